"""The JSON schema: fresh, complete, and as open as the files it describes."""

from __future__ import annotations

from pathlib import Path

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.schema import config_schema, schema_text

COMMITTED = Path(__file__).parents[2] / "configs" / "schema.json"


def test_the_committed_schema_is_fresh() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == schema_text(), "run: grpo-async schema --out configs/schema.json"


def test_required_keys_may_come_from_a_base_but_types_stay_required() -> None:
    schema = config_schema()
    assert set(schema["properties"]) == {"extends", *ExperimentConfig.model_fields}
    assert "required" not in schema
    assert {"required": ["extends"]} in schema["anyOf"]
    assert "required" not in schema["$defs"]["RunSection"]
    assert schema["$defs"]["CsvSource"]["required"] == ["type"]


def test_a_variable_may_stand_for_a_number_a_choice_and_a_boolean_but_text_needs_no_exception() -> None:
    definitions = config_schema()["$defs"]
    interpolation = {"type": "string", "pattern": r"\$\{.+\}"}
    assert interpolation in definitions["OptimizerSection"]["properties"]["lr"]["anyOf"]
    assert interpolation in definitions["InferenceSection"]["properties"]["engine"]["anyOf"]
    assert interpolation in definitions["CheckpointSection"]["properties"]["keep_every"]["anyOf"]
    assert "anyOf" not in definitions["ModelSection"]["properties"]["path"]
    assert definitions["OptimizerSection"]["properties"]["lr"]["default"] == 1e-6
