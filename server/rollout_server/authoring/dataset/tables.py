"""Readers of Parquet files and of Arrow files, in which Hugging Face `datasets` stores its datasets. They need pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.core.message import parse_json

_BATCH: Final = 64
_Decoder: TypeAlias = Callable[[Any], Any]


def parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a Parquet file; lines are 0. Raises `AuthorError`."""
    with _readable(path, "a Parquet file"):
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        with pq.ParquetFile(path) as file:
            decode = _decoder(_checked(file.schema_arrow, path))
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from _rows(batch, decode)


def arrow_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of an Arrow file, in the stream format or the file format; lines are 0. Raises `AuthorError`."""
    with _readable(path, "an Arrow file"):
        import pyarrow as pa

        with pa.OSFile(str(path), "rb") as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            decode = _decoder(_checked(reader.schema, path))
            batches = (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                batch.validate(full=True)  # reading invalid offsets would read foreign memory
                for start in range(0, batch.num_rows, _BATCH):
                    yield from _rows(batch.slice(start, _BATCH), decode)


@contextmanager
def _readable(path: Path, form: str) -> Iterator[None]:
    try:
        import pyarrow as pa
    except ModuleNotFoundError:
        raise AuthorError('Parquet and Arrow need pip install "rollout-server[parquet]"', str(path)) from None
    try:
        yield
    except AuthorError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise AuthorError(f"this is not {form}: {error}", str(path)) from None


def _rows(batch: Any, decode: Mapping[str, _Decoder]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for fields in batch.to_pylist():
        yield 0, {name: decode[name](value) if name in decode else value for name, value in fields.items()}


def _checked(schema: Any, path: Path) -> Any:
    """Return a schema whose names are unique; of equal names, rows would only have the last one."""
    doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if doubled:
        raise AuthorError(f"more than one column is called {', '.join(map(repr, doubled))}; rename one", str(path))
    return schema


def _decoder(schema: Any) -> dict[str, _Decoder]:
    """Return the decoders of the columns that contain JSON texts.

    `datasets` stores values of mixed types, such as texts and lists of parts in one conversation, as Arrow's JSON texts.
    """
    found = {field.name: _field_decoder(field) for field in schema}
    return {name: decode for name, decode in found.items() if decode is not None}


def _field_decoder(field: Any) -> _Decoder | None:
    import pyarrow as pa

    kind = field.type
    # Versions of pyarrow without the type only have the name in the field's metadata.
    stored = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if "arrow.json" in (stored, getattr(kind, "extension_name", "")):
        return lambda text: None if text is None else parse_json(text)
    if pa.types.is_struct(kind):
        members = _decoder(kind)
        return (lambda value: _decode_members(value, members)) if members else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        decode = _field_decoder(kind.value_field)
        return (lambda values: _decode_items(values, decode)) if decode else None
    return None


def _decode_members(value: Mapping[str, Any] | None, members: Mapping[str, _Decoder]) -> Any:
    if value is None:
        return None
    return {key: members[key](each) if key in members else each for key, each in value.items()}


def _decode_items(values: list[Any] | None, decode: _Decoder) -> Any:
    return None if values is None else [decode(each) for each in values]
