"""Units of measurement: symbols, names, prefixes and compounds such as `kg·m²/s²`, as exact scales over ten base dimensions.

The parser is a small grammar without recursion beyond `MAX_DEPTH`, so that hostile text costs no more than its length.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

PI = Fraction("3.1415926535897932384626433832795028841971693993751")
BASES = ("m", "kg", "s", "A", "K", "mol", "cd", "rad", "bit", "dB")
"""`rad` is a dimension here, so that turns and hertz can be told apart; see `quantity.compare` on leaving it out."""
ANGLE = BASES.index("rad")
MAX_EXPONENT, MAX_FACTORS, MAX_DEPTH = 12, 24, 6

# symbol, scale, definition, p: takes prefixes, long names. Values: SI brochure (9th edition), CODATA 2018, legal definitions.
_TABLE = """
g       0.001                kg            p gram gramme
Hz      1                    1/s           p hertz
N       1                    kg*m/s^2      p newton
Pa      1                    N/m^2         p pascal
J       1                    N*m           p joule
W       1                    J/s           p watt
C       1                    A*s           p coulomb
V       1                    W/A           p volt
F       1                    C/V           p farad
ohm     1                    V/A           p ohm
S       1                    A/V           p siemens
Wb      1                    V*s           p weber
T       1                    Wb/m^2        p tesla
H       1                    Wb/A          p henry
sr      1                    rad^2         - steradian
lm      1                    cd*rad^2      p lumen
lx      1                    lm/m^2        p lux
Bq      1                    1/s           p becquerel
Gy      1                    J/kg          p gray
Sv      1                    J/kg          p sievert
kat     1                    mol/s         p katal
min     60                   s             - minute min
h       3600                 s             - hour hr
d       86400                s             - day
week    604800               s             - week wk
yr      31557600             s             p year annum yr
L       0.001                m^3           p litre liter
l       0.001                m^3           p -
cc      1e-6                 m^3           - -
M       1000                 mol/m^3       p molar
t       1000                 kg            - tonne
ha      1e4                  m^2           - hectare
eV      1.602176634e-19      J             p electronvolt
u       1.66053906660e-27    kg            - amu
Da      1.66053906660e-27    kg            p dalton
atm     101325               Pa            - atmosphere
bar     1e5                  Pa            p bar
Torr    133.32236842105263   Pa            p torr
mmHg    133.322387415        Pa            - -
psi     6894.757293168361    Pa            - -
cal     4.184                J             p calorie
Cal     4184                 J             - -
Wh      3600                 J             p -
Ah      3600                 A*s           p -
Nm      1                    N*m           p -
erg     1e-7                 J             - erg
dyn     1e-5                 N             - dyne
kgf     9.80665              N             - -
lbf     4.4482216152605      N             - -
hp      745.6998715822702    W             - horsepower
BTU     1055.05585262        J             - btu
angstrom 1e-10               m             - angstrom
AU      149597870700         m             - au
ly      9460730472580800     m             - lightyear
pc      3.0856775814913673e16 m            p parsec
in      0.0254               m             - inch inches
ft      0.3048               m             - foot feet
yd      0.9144               m             - yard
mi      1609.344             m             - mile
nmi     1852                 m             - -
mph     0.44704              m/s           - -
kph     1/3.6                m/s           - kmh
kn      1852/3600            m/s           - knot
lb      0.45359237           kg            - pound lbs
oz      0.028349523125       kg            - ounce
gal     0.003785411784       m^3           - gallon
G       1e-4                 T             p gauss
Ci      3.7e10               1/s           p curie
dpt     1                    1/m           - dioptre diopter
deg     PI/180               rad           - degree
°       PI/180               rad           - -
arcmin  PI/10800             rad           - arcminute
arcsec  PI/648000            rad           - arcsecond
rev     2PI                  rad           - revolution turn
rpm     2PI/60               rad/s         - -
%       0.01                 1             - percent
‰       0.001                1             - permille
ppm     1e-6                 1             - ppm
ppb     1e-9                 1             - ppb
B       8                    bit           p byte
bps     1                    bit/s         p -
°C      1                    K             - celsius degc
°F      5/9                  K             - fahrenheit degf
°K      1                    K             - degk
"""
_BASE_NAMES = {
    "m": "metre meter", "s": "second sec", "A": "ampere amp", "K": "kelvin", "mol": "mole mol", "cd": "candela",
    "rad": "radian", "bit": "bit", "dB": "decibel", "kg": "kgs",
}  # fmt: skip
_OFFSETS = {"°C": Fraction("273.15"), "°F": Fraction("459.67") * Fraction(5, 9)}
_PREFIXES = {
    "Q": 30, "R": 27, "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "da": 1,
    "d": -1, "c": -2, "m": -3, "u": -6, "n": -9, "p": -12, "f": -15, "a": -18, "z": -21, "y": -24, "r": -27, "q": -30,
}  # fmt: skip
_LONG = """quetta ronna yotta zetta exa peta tera giga mega kilo hecto deca
deci centi milli micro nano pico femto atto zepto yocto ronto quecto"""
_LONG_PREFIXES = dict(zip(_LONG.split(), _PREFIXES.values(), strict=True))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A value `v` in this unit is `v * scale + offset` in the base units; `dimension` holds the exponents of `BASES`."""

    text: str
    """Canonical spelling, empty for plain numbers; reads back as the same unit."""
    scale: Fraction = Fraction(1)
    dimension: tuple[int, ...] = (0,) * len(BASES)
    offset: Fraction = Fraction(0)
    """Kelvin at 0; only of a temperature scale that stands alone: in compounds a degree is a difference."""
    known: bool = True
    """False: words that are no unit of the table, equal only to themselves."""


NONE = Unit(text="")
_SYMBOLS: dict[str, Unit] = {}
_PREFIXABLE: set[str] = set()
_NAMES: dict[str, str] = {}
"""Long name → symbol."""


class NotUnit(ValueError):
    """Not in the grammar of units, or beyond its limits."""


_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z%‰°]+)(?:\s?(?:\^|\*\*)\s*(?P<p>\()?\s*(?P<power>[+-]?[0-9]{1,3})(?(p)\s*\))|(?P<glued>[+-]?[0-9]{1,2}))?(?![0-9])"
    r"|(?P<close>\))(?:(?:\^|\*\*)\s*(?P<q>\()?\s*(?P<outer>[+-]?[0-9]{1,3})(?(q)\s*\)))?|(?P<op>[*/(]|[-.](?=\s?[A-Za-z]))|(?P<one>1(?=\s*/)))"
)
_JOINED = re.compile(r"\b(m|kg|J|N)([ms])(?=\s?\^?\s?\(?-[0-9]|\^)")
_WORDS = (
    (re.compile(r"\bdeg(?:ree)?s?\.?\s*(?:C(?:elsius)?|c(?:elsius))\b"), "°C"),
    (re.compile(r"\bdeg(?:ree)?s?\.?\s*(?:F(?:ahrenheit)?|f(?:ahrenheit))\b"), "°F"),
    (re.compile(r"°\s+(?=[CFK]\b)"), "°"),
    (re.compile(r"\bper cent\b"), "percent"),
    (re.compile(r"\b(?:square|sq\.?) ([A-Za-z]+)"), r"\1^2"),
    (re.compile(r"\bcubic ([A-Za-z]+)"), r"\1^3"),
    (re.compile(r" squared\b"), "^2"),
    (re.compile(r" cubed\b"), "^3"),
    (re.compile(r"\bper\b"), "/"),
    (re.compile(r"^/"), "1/"),
)


@lru_cache(maxsize=4096)
def parse_unit(text: str) -> tuple[Unit, ...]:
    """Readings of `text`, already in ASCII spelling (`quantity.normalise`). The first is the strict one, where `J/kg*K` is
    J·K/kg and `ms^-1` is per millisecond; others, where they differ, put a product after a slash below it, read m·s⁻¹, and
    read a lone C or F as a temperature. Raises `NotUnit`."""
    text = text.strip()
    for pattern, new in _WORDS:
        text = pattern.sub(new, text)
    if not text:
        return (NONE,)
    found = []
    for spelling in dict.fromkeys((text, _JOINED.sub(r"\1 \2", text))):
        tokens = _tokens(spelling)
        for grouped in (False, True):
            left = deque(tokens)
            found.append(_product(left, 0, grouped))
            if left:
                raise NotUnit("a parenthesis too many")
    if text in ("C", "F"):
        found.append(_SYMBOLS[f"°{text}"])
    return tuple(dict.fromkeys(found))


@lru_cache(maxsize=4096)
def lookup(word: str) -> Unit | None:
    """One symbol or name, with or without prefix; None when it is not known."""
    if word in _SYMBOLS:
        return _SYMBOLS[word]
    for length in (1, 2):
        prefix, symbol = word[:length], word[length:]
        if prefix in _PREFIXES and symbol in _PREFIXABLE:
            return _prefixed(word, _PREFIXES[prefix], symbol)
    lower = word.lower()
    for name in (lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name in _NAMES:
            return _SYMBOLS[_NAMES[name]]
        for prefix, power in _LONG_PREFIXES.items():
            symbol = _NAMES.get(name.removeprefix(prefix), "") if name.startswith(prefix) else ""
            if symbol in _PREFIXABLE:
                return _prefixed(word, power, symbol)
    return None


def _prefixed(word: str, power: int, symbol: str) -> Unit:
    base = _SYMBOLS[symbol]
    return Unit(text=word, scale=base.scale * Fraction(10) ** power, dimension=base.dimension)


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """`(kind, text, exponent)` with kind word, one, `(`, `)`, `*` or `/`; products written as a space become `*`."""
    tokens: list[tuple[str, str, int]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotUnit(f"unexpected {text[at:].strip()[:1]!r}")
        at = match.end()
        power = int(match["power"] or match["glued"] or match["outer"] or 1)
        if not 0 < abs(power) <= MAX_EXPONENT:
            raise NotUnit(f"an exponent outside ±1…{MAX_EXPONENT}")
        op = match["op"]
        kind = "word" if match["word"] else "one" if match["one"] else ")" if match["close"] else op
        kind = "*" if kind in ("-", ".") else kind
        if tokens and kind in ("word", "one", "(") and tokens[-1][0] in ("word", "one", ")"):
            tokens.append(("*", "*", 1))
        tokens.append((kind, match["word"] or kind, power))
    if len(tokens) > 2 * MAX_FACTORS:
        raise NotUnit(f"more than {MAX_FACTORS} factors")
    return tokens


def _product(tokens: deque[tuple[str, str, int]], depth: int, grouped: bool) -> Unit:
    """The unit up to a closing parenthesis or the end; its tokens are taken off. `grouped`: all factors behind a slash are below it."""
    unit = NONE
    below = False
    op = ""
    while True:
        kind, word, power = tokens.popleft() if tokens else ("", "", 1)
        if kind == "one":
            right = Unit(text="1")
        elif kind == "word":
            right = lookup(word) or Unit(text=word, known=False)
        elif kind == "(" and depth < MAX_DEPTH:
            inner = _product(tokens, depth + 1, grouped)
            if not tokens:
                raise NotUnit("a parenthesis is not closed")
            right, power = _times(NONE, inner, 1, f"({inner.text})"), tokens.popleft()[2]
        else:
            raise NotUnit(f"unexpected {word!r}" if kind else "ends where a unit is expected")
        if power != 1:
            right = _times(NONE, right, power, f"{right.text}^{power}")
        unit = (
            _times(unit, right, -1 if below else 1, f"{unit.text}{'/' if below else '*'}{right.text}") if op else right
        )
        if not tokens or tokens[0][0] == ")":
            return unit
        op = tokens.popleft()[0]
        below = op == "/" or (below and grouped)


def _times(left: Unit, right: Unit, power: int, text: str) -> Unit:
    """`left * right**power`; temperature scales become differences."""
    return Unit(
        text=text,
        scale=left.scale * right.scale**power,
        dimension=tuple(a + power * b for a, b in zip(left.dimension, right.dimension, strict=True)),
        known=left.known and right.known,
    )


def _scale(text: str) -> Fraction:
    above, _, below = text.partition("/")
    number = Fraction(above.removesuffix("PI") or 1) * (PI if above.endswith("PI") else 1)
    return number / Fraction(below or 1)


def _fill() -> None:
    for i, base in enumerate(BASES):
        _SYMBOLS[base] = Unit(text=base, dimension=tuple(int(i == j) for j in range(len(BASES))))
        _NAMES.update(dict.fromkeys(_BASE_NAMES[base].split(), base))
    _PREFIXABLE.update({"m", "s", "A", "K", "mol", "cd", "rad", "bit"})
    for line in _TABLE.strip().splitlines():
        symbol, scale, definition, prefixes, *names = line.split()
        of = NONE if definition == "1" else parse_unit(definition)[0]
        _SYMBOLS[symbol] = Unit(
            text=symbol,
            scale=of.scale * _scale(scale),
            dimension=of.dimension,
            offset=_OFFSETS.get(symbol, Fraction(0)),
        )
        _NAMES.update({name: symbol for name in names if name != "-"})
        if prefixes == "p":
            _PREFIXABLE.add(symbol)


_fill()
