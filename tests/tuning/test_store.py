"""What was measured is found again, on the same device and kernels alone; nothing in the file can stop a start."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace

import pytest

from pellucid.hardware import load_hardware
from pellucid.selection.evidence import Measurement
from pellucid.tuning.measure import Question
from pellucid.tuning.store import EvidenceStore, Fingerprint, Provenance, Record, append_line
from tests.tuning.simulated import store_at

QUESTION = Question("moe", 8, ("default", "other"), "64 experts | bf16", (("attention.decode@8", "other"),))
RESULTS = {"default": Measurement(9e-6, 1e-7), "other": Measurement(math.inf, 0.0, False, "hung: no answer within 9 s")}


def record(store: EvidenceStore, question: Question = QUESTION, seconds: float = 9e-6) -> Record:
    results = {**RESULTS, "default": Measurement(seconds, 1e-7)}
    return Record(question, store.fingerprint, results, Provenance.now({"default": 15}, {"default": 2e-7}))


def test_a_second_start_finds_what_the_first_measured(tmp_path):
    store = store_at(tmp_path)
    written = record(store)
    store.add(written)
    found = store_at(tmp_path).find(QUESTION)
    assert found is not None
    assert found.record == written
    assert found.stale == ""


def test_the_last_line_on_a_question_counts(tmp_path):
    store = store_at(tmp_path)
    for seconds in (9e-6, 7e-6):
        store.add(record(store, seconds=seconds))
    found = store_at(tmp_path).find(QUESTION)
    assert found is not None and found.record.results["default"].seconds == 7e-6


@pytest.mark.parametrize(
    "change",
    [
        {"op": "linear.bf16"},
        {"bucket": 16},
        {"order": ("default", "other", "third")},
        {"order": ("other", "default")},
        {"traits": "32 experts | bf16"},
        {"given": ()},
    ],
)
def test_figures_of_another_question_are_not_found(tmp_path, change):
    store = store_at(tmp_path)
    store.add(record(store))
    assert store_at(tmp_path).find(replace(QUESTION, **change)) is None


@pytest.mark.parametrize("hard", [{"gpu": "another"}, {"sources": "new kernels"}, {"sm_count": 114}])
def test_figures_of_another_device_or_kernel_are_unusable(tmp_path, hard):
    store = store_at(tmp_path)
    store.add(record(store))
    assert store_at(tmp_path, hard=hard).find(QUESTION) is None


def test_figures_of_other_versions_are_stale_and_say_which_until_there_are_newer(tmp_path):
    store = store_at(tmp_path)
    store.add(record(store))
    later = store_at(tmp_path, soft={"torch": "2.12.1", "driver": "600"})
    found = later.find(QUESTION)
    assert found is not None
    assert found.stale == "driver absent is 600 now, torch 2.11.0 is 2.12.1 now"
    later.add(record(later, seconds=5e-6))
    found = store_at(tmp_path, soft={"torch": "2.12.1", "driver": "600"}).find(QUESTION)
    assert found is not None and found.stale == "" and found.record.results["default"].seconds == 5e-6


def test_a_skipped_question_counts_as_answered_but_never_hides_figures(tmp_path):
    store = store_at(tmp_path)
    store.add(replace(record(store), results={}, skipped="time was up"))
    found = store_at(tmp_path).find(QUESTION)
    assert found is not None and found.record.skipped == "time was up"
    store.add(record(store))
    store.add(replace(record(store), results={}, skipped="time was up"))
    found = store_at(tmp_path).find(QUESTION)
    assert found is not None and found.record.results == RESULTS
    # Of other versions, nothing is known from it.
    assert store_at(tmp_path / "empty").find(QUESTION) is None


def test_lines_that_are_damaged_are_skipped_with_a_note_and_the_rest_is_read(tmp_path):
    store = store_at(tmp_path)
    store.add(record(store))
    whole = store.path.read_text().strip()
    values = json.loads(whole)
    broken = [
        whole[:40],
        "[]",
        "\x00\xff",
        json.dumps({**values, "version": 99}),
        json.dumps({**values, "results": {"default": {"right": True, "detail": ""}}}),
        json.dumps({**values, "results": {"default": {"right": True, "detail": "", "seconds": -1, "error": 0}}}),
        json.dumps({**values, "results": {"default": {"right": "yes", "detail": "", "seconds": 1, "error": 0}}}),
    ]
    store.path.write_text("\n".join([*broken, "", whole]) + "\n")
    again = store_at(tmp_path)
    assert again.find(QUESTION) is not None
    assert len(again.notes) == 1
    assert "lines 1, 2, 3, 4, 5 and 2 more skipped" in again.notes[0]


def test_a_line_torn_by_a_crash_does_not_spoil_the_next(tmp_path):
    store = store_at(tmp_path)
    store.add(record(store))
    with store.path.open("a") as file:
        file.write('{"version": 1, "op": "mo')
    store.add(record(store, seconds=7e-6))
    again = store_at(tmp_path)
    found = again.find(QUESTION)
    assert found is not None and found.record.results["default"].seconds == 7e-6
    assert "line 2 skipped" in again.notes[0]


def test_lines_of_several_writers_stay_whole(tmp_path):
    path = tmp_path / "lines"

    def write(letter: str) -> None:
        for _ in range(40):
            append_line(path, letter * 3000 + "\n")

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 120
    assert {(line[0], len(set(line)), len(line)) for line in lines} == {(letter, 1, 3000) for letter in "abc"}


def test_a_folder_that_cannot_be_written_is_a_note_and_figures_hold_for_this_start(tmp_path):
    (tmp_path / "file").write_text("")
    store = store_at(tmp_path / "file")
    for _ in range(2):
        store.add(record(store))
    assert store.find(QUESTION) is not None
    # It can't be read either, which is worth one note of its own.
    assert sum("can't be kept" in note for note in store.notes) == 1


def test_every_line_says_where_it_comes_from(tmp_path):
    store = store_at(tmp_path)
    store.add(record(store))
    values = json.loads(store.path.read_text())
    assert values["samples"] == {"default": 15}
    assert values["spread"] == {"default": 2e-7}
    assert values["when"].endswith("Z") and values["command"]
    assert values["hard"]["gpu"] == "simulated"
    assert "/" not in values["command"]


def test_the_fingerprint_of_a_machine_is_hard_in_its_device_and_soft_in_its_versions():
    card = load_hardware("h200")
    own = Fingerprint.of(card, "cuda")
    assert own.hard["gpu"] == card.gpus[0].name and own.hard["sm"] == 90
    assert {"driver", "cuda", "torch", "triton"} <= own.soft.keys()
    newer = Fingerprint.of(replace(card, driver="600.1", packages={**card.packages, "torch": "9.9"}), "cuda")
    assert newer.hard == own.hard
    assert own.soft != newer.soft
    assert "driver" in newer.changed(own.soft) and "torch" in newer.changed(own.soft)
    gpu = replace(card.gpus[0], sm_count=114)
    assert Fingerprint.of(replace(card, gpus=(gpu,)), "cuda").hard != own.hard
    assert Fingerprint.of(card, "cpu").hard.keys() >= {"cpu", "cores"}


def test_machines_have_files_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    paths = {EvidenceStore.of(load_hardware(name), "cuda").path for name in ("h200", "a100", "rtx-4090")}
    assert len(paths) == 3
    assert all(path.parent == tmp_path / "evidence" for path in paths)
    assert not any(path.exists() for path in paths)
