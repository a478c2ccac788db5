"""Jobs and results as JSON values. Bytes are text where they are UTF-8, else `{"base64": "…"}`: both ways without loss."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.job import Job, Level, Limits, Result, Status

Blob = str | Mapping[str, str]


def encode_bytes(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def decode_bytes(value: Blob) -> bytes:
    """Raises `BadInput` for text that cannot be encoded and for what is no base64."""
    try:
        if isinstance(value, str):
            return value.encode()
        return base64.b64decode(value["base64"], validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError, KeyError, TypeError):
        raise BadInput('sandbox bytes: expected UTF-8 text or {"base64": "…"} with valid base64') from None


def encode_job(job: Job) -> dict[str, Any]:
    return {
        "source": encode_bytes(job.source),
        "kind": job.kind,
        "preload": job.preload,
        "stdin": encode_bytes(job.stdin),
        "files": {name: encode_bytes(data) for name, data in job.files.items()},
        "args": list(job.args),
        "collect": list(job.collect),
        "limits": dict(vars(job.limits)),  # `asdict` copies deeply, which takes longer than all else here
    }


def decode_job(value: Mapping[str, Any], defaults: Limits | None = None) -> Job:
    """`defaults`: for limits that `value` does not name. Raises `BadInput` for what is no job."""
    asked = {name: limit for name, limit in (value.get("limits") or {}).items() if limit is not None}
    return Job(
        source=decode_bytes(value["source"]),
        kind=value.get("kind", "python"),
        preload=value.get("preload", "code"),
        stdin=decode_bytes(value.get("stdin", "")),
        files={name: decode_bytes(data) for name, data in value.get("files", {}).items()},
        args=tuple(value.get("args", ())),
        collect=tuple(value.get("collect", ())),
        limits=Limits(**(vars(defaults or Limits()) | asked)),
    )


def digest(job: Job, *more: object) -> str:
    """The same for equal jobs and nothing else: what an id stands for. Whether it is trusted does not count."""
    text = json.dumps([encode_job(job), *more], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def encode_result(result: Result) -> dict[str, Any]:
    return vars(result) | {
        "status": result.status.value,
        "stdout": encode_bytes(result.stdout),
        "stderr": encode_bytes(result.stderr),
        "files": {name: encode_bytes(data) for name, data in result.files.items()},
        "level": result.level.name.lower(),
        "isolation": dict(result.isolation),
    }


def decode_result(value: Mapping[str, Any]) -> Result:
    return Result(
        **{
            **value,
            "status": Status(value["status"]),
            "stdout": decode_bytes(value["stdout"]),
            "stderr": decode_bytes(value["stderr"]),
            "files": {name: decode_bytes(data) for name, data in value["files"].items()},
            "level": Level[value["level"].upper()],
        }
    )
