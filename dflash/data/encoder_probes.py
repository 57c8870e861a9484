"""Fixed texts on which encoders are compared before one is trusted."""

from __future__ import annotations

from collections.abc import Iterable

# Scripts, combining marks, digits, white space, pairs that NFC joins, long words, code, text that nearly is a control
# token. One that differs between two tokenizers of the same family is worth more than ten that don't.
TEXT_PROBES: tuple[str, ...] = (
    "",
    " ",
    "\n",
    "a",
    "The quick brown fox doesn't jump; it'll WAIT. I'Ve said so, they'RE here.",
    "नमस्ते दुनिया, हिन्दी में क्षत्रिय और श्रीमान्",
    "ภาษาไทยไม่มีช่องว่าง น้ำ ที่ เก่ง",
    "שָׁלוֹם עוֹלָם",
    "اَلسَّلامُ عَلَيْكُمْ ١٢٣",
    "Привет, мир! Ёлка й",
    "Ελληνικά ά έ",
    "漢字と仮名、ひらがな。カタカナ!㍿",
    "中文没有空格,但有标点。",
    "한국어 각 각",
    "Tiếng Việt: ồ ồ ự ự",
    "é é ñ ñ Å Å ﬁ Ω Ω",
    "0 12 345 6789 1234567890 ٣٤٥ 3.14159 1,000,000 ½ ²",
    "  two   three    four\t\ttabs \t mixed",
    "line\nline\n\nline\n\n\nline\r\nline\r\n\r\nline \n line\n ",
    "trailing spaces   ",
    "   \n\n  \n",
    "\u00a0\u3000\u2003\u200b\u200d\ufeff\u2028\u2029\x85\x0b\x0c",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # comment\n\n\tif x != y && z || !w;",
    "<html><b>&amp;</b></html> <|im_ <|im_end |im_end|> < think> </ think>",
    "https://example.org/a_b-c?d=e%20f#g user@example.org C:\\path\\file.txt",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\U0001f600\U00010348\U0002070e\U000e0001\U0010ffff",
    "\x00\x01\x1f\x7f\ufffd\uffff",
    "a" * 600,
    "Donaudampfschifffahrtsgesellschaftskapitän" * 8,
    "!?!?" * 60 + "=" * 130 + "-" * 77,
    "🙂" * 50,
    # ruff: noqa: RUF001 (look-alike letters are the point)
    "α̂́̃ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "camelCaseXMLHttpRequest snake_case_name SCREAMING_CASE x86_64 v1.2.3-rc.4",
    "$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$ \\boxed{[[1,2],[3,4]]}",
)


def added_token_probes(added: Iterable[str]) -> list[str]:
    """Texts that hold each added token: alone, inside a word, between spaces and newlines, doubled, cut short."""
    probes = []
    for token in added:
        probes += [token, f"a{token}b", f" {token} ", f"\n{token}\n\n", f"{token}{token}", token[:-1], f"<{token}>"]
    return probes
