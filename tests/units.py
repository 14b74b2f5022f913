"""Which files one process runs, and what begins first."""

# Those that take long, the longest first.
UNITS: tuple[tuple[str, ...], ...] = (
    # Servers on the embedded model, one for each drafter.
    (
        "tests/e2e/test_bad_input.py",
        "tests/e2e/test_counting.py",
        "tests/e2e/test_disconnect.py",
        "tests/e2e/test_fuzz.py",
        "tests/e2e/test_metrics.py",
        "tests/e2e/test_mixed_batch.py",
        "tests/e2e/test_openai_client.py",
        "tests/e2e/test_speculation.py",
        "tests/e2e/test_threads.py",
    ),
    # What the tiny model says to each request alone.
    (
        "tests/v1/e2e/test_budget_faults.py",
        "tests/v1/e2e/test_budget_matrix.py",
        "tests/v1/e2e/test_feature_matrix.py",
        "tests/v1/e2e/test_speculation_matrix.py",
    ),
    ("tests/v1/e2e/test_speculation_grammar.py",),
    ("tests/v1/e2e/test_speculation_sampling.py",),
    ("tests/e2e/test_transformers_parity.py",),
    ("tests/model_executor/models/test_embedded_model.py",),
    ("tests/benchmarks/test_quantization_error.py",),
    ("tests/benchmarks/test_speculative_decoding.py",),
    ("tests/v1/test_compile.py",),
    ("tests/v1/e2e/test_engine_laws.py",),
    ("tests/v1/engine/test_async_llm.py",),
    ("tests/v1/engine/test_core_process.py",),
)
_UNIT_OF = {path: unit[0] for unit in UNITS for path in unit}
_PLACES = {unit[0]: place for place, unit in enumerate(UNITS)}


def find_unit(node_id: str) -> str:
    """Return the name of a test's unit: its first file, or the test's file."""
    path = node_id.split("::", 1)[0]
    return _UNIT_OF.get(path, path)


def find_place(node_id: str) -> int:
    """Return where a test's unit stands among all; short ones stand together, last."""
    return _PLACES.get(find_unit(node_id), len(UNITS))
