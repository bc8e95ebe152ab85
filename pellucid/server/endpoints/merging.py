"""Several asynchronous iterators as one. Used where one request has several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """(index of the source, item) as items come; each source's items keep their order.

    The first error of a source is raised here, and the others are left where they are.
    """
    if len(sources) == 1:
        async for item in sources[0]:
            yield 0, item
        return
    items: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                items.put_nowait((index, item))
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader of the merged stream raises it
            items.put_nowait(error)
        else:
            items.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    unfinished = len(tasks)
    try:
        while unfinished:
            news = await items.get()
            if news is None:
                unfinished -= 1
            elif isinstance(news, BaseException):
                raise news
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
