"""How text is cut before byte pair encoding: a table of facts by `tokenizer.ggml.pre` name, read by both loaders.

Each rule is a list of regular expressions (Oniguruma syntax, as in tokenizer.json). They are applied in turn:
every match, and every gap between matches, becomes a piece of its own that the next one cuts further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.core import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """One rule of the table.

    `ignore_merges`: a piece that is itself a token is taken whole, merges or not (tiktoken's rule).
    `add_bos` is the default where the file does not say. `nfc`: text is brought to Unicode NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_WORD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_NOT_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_NOT_WORD}\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|{_NOT_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = (
    rf"{_NOT_WORD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?|{_NOT_WORD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (
    rf"{_NOT_WORD}[{_UPPER}]*[{_LOWER}]+|{_NOT_WORD}[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
# Runs of Han stand alone, so the word classes exclude them.
_KIMI = (
    rf"[\p{{Han}}]+|{_NOT_WORD}[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_CONTRACTION}?"
    rf"|{_NOT_WORD}[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK_DEEPSEEK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, of the scripts that DeepSeek's first vocabulary knew.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION_DEEPSEEK = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"

KIMI = PreTokenizerRule((_KIMI,), ignore_merges=True)

_FALLBACK = PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN_GPT2 = PreTokenizerRule((_GPT2,))
_DIGIT_BY_DIGIT = PreTokenizerRule((r"\p{N}", _GPT2))

PRE_TOKENIZERS: dict[str, PreTokenizerRule] = {
    "default": _FALLBACK,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "trillion"), _PLAIN_GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGIT_BY_DIGIT
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizerRule((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizerRule((_LLAMA3,), ignore_merges=True)),
    "qwen2": PreTokenizerRule((_QWEN2,), nfc=True),
    "qwen35": PreTokenizerRule((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"), PreTokenizerRule((_QWEN2,))),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), PreTokenizerRule((_GPT4O,))),
    "tekken": PreTokenizerRule((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        PreTokenizerRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)),
    ),
    "deepseek-llm": PreTokenizerRule(
        (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_PUNCTUATION_DEEPSEEK}]+", r"\s+$", _CJK_DEEPSEEK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizerRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK, r"\p{N}")),
    "kimi-k2": KIMI,
}
"""Pre-tokenizer name of a GGUF file -> rule. A name may be added when its tokenizer.json is at hand to compare."""


def find_pre_tokenizer(name: str) -> PreTokenizerRule:
    """The rule of that name.

    Raises:
        UnsupportedModelError: the name is not in the table; a guess would silently give other tokens.
    """
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known, and any other would cut the text into "
            f"wrong tokens; serve the model from its Hugging Face directory (tokenizer.json carries the rule). "
            f"Known: {', '.join(sorted(PRE_TOKENIZERS))}",
            trait=f"tokenizer.ggml.pre={name}",
        )
    return rule


def build_pre_tokenizer(rule: PreTokenizerRule) -> PreTokenizer:
    """The rule as a `tokenizers` object that ends in the byte-level alphabet."""
    from tokenizers import Regex, pre_tokenizers

    cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, to_alphabet])
