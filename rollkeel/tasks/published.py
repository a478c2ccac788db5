"""Rows of public data sets in the forms they are published in, told apart by their columns: problems with their grader, preference
pairs, and issues of repositories.

| form | recognised by | becomes |
|---|---|---|
| ours | `prompt`, `grader`, perhaps `grader_options`, `answer`, `solution` | a problem |
| SWE-bench | `instance_id`, `problem_statement`, `FAIL_TO_PASS` | an `Issue` |
| arena-human-preference | `winner`, `conversation_a`, `conversation_b` | a `Pair`; ties are refused |
| preference pairs | `chosen`, `rejected` (texts or conversations), `prompt` | a `Pair` |
| AutoIF | `eval_func`, with `query` and `instruction`, or `prompt` | a problem for `judge`: the share of its verification functions that hold |
| IFEval | `instruction_id_list`, `kwargs` | a problem for `constraints` |
| RLVR-IFEval, -GSM, -MATH | `messages`, `ground_truth` | for `constraints` where the truth names a function, else for `math` |
| verl: DAPO-Math-17k | `prompt`, `reward_model` with `ground_truth` | for `math` where `ability` or `data_source` says mathematics |
| WMT | `translation` of two languages, the first into the second, or `source`, `target` | for `translation` |
| code | see `tests_form` | for `code` |
| Magpie, Alpaca | `instruction`, `response` or `output` | a problem with a solution, and no grader |
| conversations | `conversations` or `messages`, of `role`, `content` or `from`, `value` | its last answer is the solution; no grader |
| questions | `prompt`, `problem` or `question`, with `answer`; `prompt` alone | a problem without a grader |

A column that is null counts as absent, and one that is text may hold JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.tasks.base import excerpt
from rollkeel.tasks.data import Row
from rollkeel.tasks.tests_form import SOLUTIONS, Refused, code_row
from rollkeel.types import GraderSpec

Record = Mapping[str, Any]
Message = dict[str, str]
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Names of speakers other than `user`, `assistant`, `system` and `tool`."""
LANGUAGES = {
    "ar": "Arabic",
    "cs": "Czech",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "sv": "Swedish",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
TIE = "a tie prefers nothing"
SEVERAL = "expected one question and one answer on both sides, got conversations of several turns"
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(?:role|content|from|value)"')
"""How a text begins that is a conversation in JSON."""
MATHEMATICS = ("math", "gsm8k", "aime", "amc", "numina", "olympiad")
_HELD = """
def judge(text, given):
    held = []
    for source in given:
        try:
            names = {}
            exec(source, names)
            held.append(bool(names["evaluate"](text)))
        except Exception as error:
            print(error)
    if not held:
        raise RuntimeError("no verification function has a verdict")
    return sum(held) / len(held), f"{sum(held)} of {len(held)} verification functions hold"
"""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two responses to one prompt; `chosen` was preferred."""

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0
    """By how much the reward of `chosen` should at least be larger, where the data say so."""


@dataclass(frozen=True, kw_only=True)
class Issue:
    """A fault of a repository, the patch that mends it, and the tests that tell."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    """Unified diff of the reference."""
    test_patch: str
    """Unified diff that adds the tests; not for the policy to see."""
    fail_to_pass: tuple[str, ...]
    """Tests that fail before the patch and pass after it."""
    pass_to_pass: tuple[str, ...]


def read_pair(record: Record) -> Pair:
    """A row that must be a preference pair. Raises `Refused`."""
    form = _arena if "winner" in record else _pairs
    columns = next(columns for columns, reads in FORMS if reads is form)
    filled = {k: v for k, v in record.items() if v is not None}
    if absent := sorted(columns - filled.keys()):
        raise Refused(f"no column {absent[0]!r}; present: {', '.join(map(repr, filled)) or 'none'}")
    return form(filled)


def read(record: Any, number: int = 0) -> Row | Pair | Issue:
    """What a row is, by its columns. Raises `Refused` with what was expected."""
    if not isinstance(record, Mapping):
        raise Refused("expected a JSON object")
    filled = {k: v for k, v in record.items() if v is not None}
    for columns, form in FORMS:
        if columns <= filled.keys():
            made = form(filled)
            return replace(made, number=number) if isinstance(made, Row) else made
    there = ", ".join(map(str, list(filled)[:8])) or "none"
    raise Refused(f"expected the columns of a known form (rollkeel/tasks/published.py), got {there}")


def _json(value: Any, column: str) -> Any:
    """The value, out of JSON where it is text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise Refused(f"{column}: expected JSON, got {excerpt(value, 40)!r}") from None


def _text(record: Record, column: str, empty: bool = False) -> str:
    """Raises `Refused` where it is no Unicode text; `empty`: it may be."""
    value = record.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not (empty or value.strip()):
        got = "nothing" if value is None else f"{type(value).__name__} {excerpt(str(value), 40)!r}"
        raise Refused(f"{column}: expected text, got {got}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"{column}: holds a lone surrogate, which is not Unicode text") from None
    return value


def _texts(record: Record, column: str) -> tuple[str, ...]:
    values = _json(record.get(column), column)
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise Refused(f"{column}: expected a list of texts, got {excerpt(str(values), 40)!r}")
    return tuple(values)


def conversation(record: Record, column: str) -> list[Message]:
    """Messages of a column: a list of `role`, `content` or `from`, `value`, or text, which is the user's."""
    value = record.get(column)
    if isinstance(value, str) and not _MESSAGES.match(value):
        return [{"role": "user", "content": _text(record, column)}]
    value = _json(value, column)
    if not isinstance(value, list) or not value:
        raise Refused(f"{column}: expected a list of messages, got {excerpt(str(value), 40)!r}")
    return [_message(message, column) for message in value]


def _message(message: Any, column: str) -> Message:
    given: Record = message if isinstance(message, Mapping) else {}
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if isinstance(content, list):  # of parts, one a kind of medium
        if not all(isinstance(part, Mapping) and part.get("type", "text") == "text" for part in content):
            raise Refused(f"{column}: expected messages of text, got other media")
        content = "".join(str(part.get("text", "")) for part in content)
    role = ROLES.get(str(role), role)
    if role not in ("user", "assistant", "system", "tool"):
        raise Refused(f"{column}: expected role or from to be user, assistant, system or tool, got {role!r}")
    return {"role": role, "content": _text({column: content}, column)}


def _asked(
    messages: Sequence[Message], answer: str = "", solution: str | None = None, grader: GraderSpec | None = None
) -> Row:
    """A problem whose prompt is a conversation."""
    if not messages or messages[-1]["role"] == "assistant":
        raise Refused("expected a conversation that ends with a question")
    spoken = () if [m["role"] for m in messages] == ["user"] else tuple(messages)
    text = "\n\n".join(m["content"] for m in messages)
    return Row(number=0, prompt=text, answer=answer, solution=solution, messages=spoken, grader=grader)


def _ours(record: Record) -> Row:
    name, options = _text(record, "grader"), _json(record.get("grader_options", {}), "grader_options")
    if not isinstance(options, Mapping):
        raise Refused(f"grader_options: expected a mapping, got {type(options).__name__}")
    answer, solution = (_text(record, c, True) if c in record else None for c in ("answer", "solution"))
    return _asked(conversation(record, "prompt"), answer or "", solution, GraderSpec(name=name, options=options))


def _issue(record: Record) -> Issue:
    fields = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
    texts = {name: _text(record, name) for name in fields}
    owner, _, name = texts["repo"].partition("/")
    if not owner or not name:
        raise Refused(f"repo: expected owner/name, got {texts['repo']!r}")
    for column in ("patch", "test_patch"):
        if not any(line.startswith(("diff --git ", "--- ")) for line in texts[column].splitlines()):
            raise Refused(f"{column}: expected a unified diff, got {excerpt(texts[column], 40)!r}")
    if not (failing := _texts(record, "FAIL_TO_PASS")):
        raise Refused("FAIL_TO_PASS: expected at least one test, got none")
    passing = _texts(record, "PASS_TO_PASS") if "PASS_TO_PASS" in record else ()
    if both := sorted(set(failing) & set(passing)):
        raise Refused(f"FAIL_TO_PASS and PASS_TO_PASS: expected different tests, both have {both[0]!r}")
    return Issue(**texts, fail_to_pass=failing, pass_to_pass=passing)


def _arena(record: Record) -> Pair:
    sides = {"model_a": conversation(record, "conversation_a"), "model_b": conversation(record, "conversation_b")}
    winner = str(record["winner"])
    if winner in ("tie", "tie (bothbad)", "both_bad"):
        raise Refused(TIE)
    if winner not in sides:
        raise Refused(f"winner: expected model_a, model_b or a tie, got {excerpt(winner, 40)!r}")
    return _pair(sides.pop(winner), next(iter(sides.values())), 0.0)


def _pairs(record: Record) -> Pair:
    margin = record.get("margin") or 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < float("inf"):
        raise Refused(f"margin: expected a finite number ≥ 0, got {margin!r}")
    before = conversation(record, "prompt") if "prompt" in record else []
    sides = []
    for column in ("chosen", "rejected"):
        value = record[column]
        if isinstance(value, str) and not _MESSAGES.match(value):
            said = [{"role": "assistant", "content": _text(record, column, empty=column == "rejected")}]
        else:
            said = conversation(record, column)
        sides.append(said if said[: len(before)] == before and before else [*before, *said])
    return _pair(sides[0], sides[1], float(margin))


def _pair(chosen: Sequence[Message], rejected: Sequence[Message], margin: float) -> Pair:
    """Raises `Refused` where the two are not answers to one question of the user's."""
    if [m["role"] for m in chosen] != ["user", "assistant"] or [m["role"] for m in rejected] != ["user", "assistant"]:
        raise Refused(SEVERAL)
    if chosen[0] != rejected[0]:
        raise Refused("expected answers to one question, got two questions")
    if chosen[1] == rejected[1]:
        raise Refused("chosen and rejected are equal")
    return Pair(
        prompt=chosen[0]["content"], chosen=chosen[1]["content"], rejected=rejected[1]["content"], margin=margin
    )


def _autoif(record: Record) -> Row:
    functions = _json(record["eval_func"], "eval_func")
    functions = [f[0] if isinstance(f, list) and f else f for f in functions] if isinstance(functions, list) else []
    if not functions or not all(isinstance(f, str) and "def evaluate" in f for f in functions):
        raise Refused("eval_func: expected sources of def evaluate(response), each alone or with its score")
    text = (
        f"{_text(record, 'query')}\n\n{_text(record, 'instruction')}" if "query" in record else _text(record, "prompt")
    )
    grader = GraderSpec(name="judge", options={"judge": _HELD, "given": functions})
    return _asked([{"role": "user", "content": text}], grader=grader)


def _constraints(prompt: Sequence[Message], read_them: Callable[[], list[dict[str, Any]]]) -> Row:
    try:
        constraints = read_them()
    except BadInput as error:
        raise Refused(str(error)) from None
    if not constraints:
        raise Refused("expected at least one constraint, got none")
    return _asked(prompt, grader=GraderSpec(name="constraints", options={"constraints": constraints}))


def _ifeval(record: Record) -> Row:
    from rollkeel.tasks.constraints import from_ifeval

    columns = {c: _json(record[c], c) for c in ("instruction_id_list", "kwargs")}
    return _constraints(conversation(record, "prompt"), lambda: from_ifeval(columns))


def _rlvr(record: Record) -> Row:
    from rollkeel.tasks.constraints import from_rlvr

    truth, messages = record["ground_truth"], conversation(record, "messages")
    messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    if isinstance(truth, Mapping) or (isinstance(truth, str) and truth.lstrip().startswith("{")):
        parsed = _json(truth, "ground_truth")
        return _constraints(messages, lambda: from_rlvr(parsed))
    return _asked(messages, _text({"ground_truth": truth}, "ground_truth"), grader=_mathematics(record, "dataset"))


def _verl(record: Record) -> Row:
    about, more = (_json(record.get(c, {}), c) for c in ("reward_model", "extra_info"))
    if not isinstance(about, Mapping):
        raise Refused(f"reward_model: expected a mapping with ground_truth, got {type(about).__name__}")
    worked = more.get("answer") if isinstance(more, Mapping) else None
    answer = _text({"reward_model.ground_truth": about.get("ground_truth")}, "reward_model.ground_truth")
    solution = worked if isinstance(worked, str) and worked.strip() else None
    return _asked(conversation(record, "prompt"), answer, solution, _mathematics(record, "ability", "data_source"))


def _mathematics(record: Record, *columns: str) -> GraderSpec | None:
    named = " ".join(str(record.get(column, "")).lower() for column in columns)
    return GraderSpec(name="math", options={}) if any(word in named for word in MATHEMATICS) else None


def _translation(record: Record) -> Row:
    if "translation" in record:
        both = _json(record["translation"], "translation")
        if not isinstance(both, Mapping) or len(both) != 2:
            raise Refused("translation: expected texts of two languages")
        (source, target), record = map(str, both), {**both}
    else:
        pair = [str(record.get(c, "")) for c in ("source_lang", "target_lang")]
        source, target = pair if all(pair) else [*str(record.get("lp", "")).split("-"), "", ""][:2]
        record = {source or "source": record["source"], target or "target": record["target"]}
    asks = "Translate" + "".join(
        f" {word} {_language(code)}" for word, code in (("from", source), ("into", target)) if code
    )
    text, answer = (_text(record, column) for column in record)
    grader = GraderSpec(name="translation", options={})
    return _asked([{"role": "user", "content": f"{asks}:\n\n{text}"}], answer, grader=grader)


def _language(code: str) -> str:
    return LANGUAGES.get(code.replace("_", "-").split("-")[0].lower(), code)


def _instruction(record: Record) -> Row:
    text = _text(record, "instruction")
    if str(record.get("input", "")).strip():
        text += f"\n\n{_text(record, 'input')}"
    answer = _text(record, "response" if "response" in record else "output")
    return _asked([{"role": "user", "content": text}], answer, answer)


def _spoken(record: Record) -> Row:
    messages = conversation(record, "conversations" if "conversations" in record else "messages")
    if messages[-1]["role"] != "assistant":
        return _asked(messages)
    answer = messages[-1]["content"]
    return _asked(messages[:-1], answer, answer)


def _question(record: Record) -> Row:
    column = next(c for c in ("prompt", "problem", "question") if c in record)
    worked = next((record[c] for c in SOLUTIONS if isinstance(record.get(c), str) and record[c].strip()), None)
    return _asked(conversation(record, column), _text(record, "answer"), worked)


def _alone(record: Record) -> Row:
    return _asked(conversation(record, "prompt"))


FORMS: tuple[tuple[set[str], Callable[[Record], Row | Pair | Issue]], ...] = (
    ({"prompt", "grader"}, _ours),
    ({"instance_id", "problem_statement", "FAIL_TO_PASS"}, _issue),
    ({"winner", "conversation_a", "conversation_b"}, _arena),
    ({"chosen", "rejected"}, _pairs),
    ({"eval_func"}, _autoif),
    ({"instruction_id_list", "kwargs"}, _ifeval),
    ({"messages", "ground_truth"}, _rlvr),
    ({"prompt", "reward_model"}, _verl),
    ({"translation"}, _translation),
    ({"source", "target"}, _translation),
    *(
        (columns, code_row)
        for columns in ({"test_list"}, {"test", "entry_point"}, {"input_output"}, {"public_test_cases"}, {"tests"})
    ),
    ({"instruction", "response"}, _instruction),
    ({"instruction", "output"}, _instruction),
    ({"conversations"}, _spoken),
    ({"messages"}, _spoken),
    *(({column, "answer"}, _question) for column in ("prompt", "problem", "question")),
    ({"prompt"}, _alone),
)
"""Columns that a form is recognised by, in the order in which they are looked for."""
