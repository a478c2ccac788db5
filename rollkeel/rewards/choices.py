"""Which letter of several a final answer settles on.

| part of `A) is wrong, (B) is right, because …` | read as |
|---|---|
| letters called wrong, in front | left out |
| a letter alone, in brackets, or before `)`, `.`, `:`, `,`, ` is`, ` must` | the letter |
| ` is right`, `, because …`, `, not C` behind it | an aside |
| another letter right behind it, or behind `or`, `and`, `otherwise` and the like; a doubt; any other statement | nothing is settled |
"""

from __future__ import annotations

import re

_STYLE = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_LETTER = r"(?:option |choice )?(?:\(([{0}])\)|\[([{0}])\]|([{0}])(?=$|[).:,]|(?: is| must)\b))"
_REFUSED = rf"(?i)(?:{_LETTER}[).:]? (?:is|are) (?:wrong|incorrect|false|not (?:right|correct))(?: because [^.,;]*)?[,;.]\s*(?:and |but |so )?)*"
_ASIDE = re.compile(
    r"^[).:]?\s*(?:is|must be) (?:the )?(?:correct|right|best|true)(?: answer| option| choice)?$"
    r"|[,;.]?\s*(?:because\b|since\b|not \(?(?-i:[A-Z])\b).*",
    re.IGNORECASE | re.DOTALL,
)
_SECOND = (
    r"^\s*[(\[]?[{0}][)\]]?(?=$|[).,:/])|(?:^|[^A-Za-z])(?:or|and|but|otherwise|else|,|/)\s*\(?[{0}]\)?(?![A-Za-z])"
)
_UNSETTLED = re.compile(r"[).:,]?\s*(?:is|must|maybe|perhaps|possibly)\b", re.IGNORECASE)


def settled(text: str, letters: str) -> str | None:
    """The letter, in capitals; None for none and for several. `letters` are those to choose from, in capitals."""
    text = _STYLE.sub(r"\1", text).strip().strip("*").strip()
    text = re.sub(_REFUSED.replace("{0}", letters), "", text, count=1)
    found = re.match("(?i)" + _LETTER.replace("{0}", letters), text)
    if found is None:
        return None
    rest = _ASIDE.sub("", text[found.end() :])
    if re.search(_SECOND.replace("{0}", letters), rest) or _UNSETTLED.match(rest):
        return None
    return str(found[found.lastindex or 0]).upper()
