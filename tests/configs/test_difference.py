"""What a changed config file would do to the app that runs: each effect against Ray Serve's own decision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.difference import Change, Effect, changes
from configs.load import load_app_config
from tests.cluster.test_cli import CONFIG, run
from tests.conftest import ROOT


def changed(tmp_path: Path, *edits: tuple[str, Any]) -> tuple[Path, Path]:
    """The shipped config, and a copy of it in which paths (`applications.0.args.dtype`) have other values."""
    document = yaml.safe_load((ROOT / CONFIG).read_text())
    document["applications"][0]["deployments"] = [{"name": "Engine", "max_queued_requests": 100}]
    before = copy.deepcopy(document)
    for path, value in edits:
        *parents, last = path.split(".")
        place = document
        for part in parents:
            place = place[int(part)] if part.isdigit() else place.setdefault(part, {})
        place[last] = value
    files = tmp_path / "before.yaml", tmp_path / "after.yaml"
    for file, content in zip(files, (before, document), strict=True):
        file.write_text(yaml.safe_dump(content, sort_keys=False))
    return files


def found(tmp_path: Path, *edits: tuple[str, Any]) -> list[Change]:
    before, after = changed(tmp_path, *edits)
    return changes(load_app_config(before), load_app_config(after))


ROUTER = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
ENGINE = "applications.0.deployments.0"
EDITS: list[tuple[str, Any]] = [
    ("applications.0.args.tensor_parallel_size", 3),
    ("applications.0.args.num_replicas", 2),
    ("applications.0.args.server", {"max_n": 7}),
    ("applications.0.args.attention", {"backend": "auto"}),  # the default, spelled out
    ("applications.0.runtime_env", {"env_vars": {"X": "1"}}),
    ("applications.0.logging_config", {"log_level": "DEBUG"}),
    ("applications.0.route_prefix", "/llm"),
    (f"{ENGINE}.num_replicas", 3),
    (f"{ENGINE}.max_queued_requests", 7),
    (f"{ENGINE}.max_ongoing_requests", 7),
    (f"{ENGINE}.graceful_shutdown_timeout_s", 99.0),
    (f"{ENGINE}.health_check_period_s", 3.0),
    (f"{ENGINE}.autoscaling_config", {"min_replicas": 1, "max_replicas": 4}),
    (f"{ENGINE}.autoscaling_config", {"policy": {"policy_function": "cluster.serve.autoscaling:LoadPolicy"}}),
    (f"{ENGINE}.request_router_config", {"request_router_class": ROUTER}),
    (f"{ENGINE}.ray_actor_options", {"num_cpus": 2.0}),
    (f"{ENGINE}.max_replicas_per_node", 1),
]


def serve_restarts(before: Path, after: Path) -> bool:
    """Whether Ray Serve, told `after` where `before` runs, starts the replicas' actors anew."""
    from ray.serve._private.config import DeploymentConfig
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve._private.version import DeploymentVersion
    from ray.serve.schema import ServeApplicationSchema

    versions = []
    for file in (before, after):
        application = yaml.safe_load(file.read_text())["applications"][0]
        schema = ServeApplicationSchema.model_validate(application)
        options = {key: value for key, value in application["deployments"][0].items() if key != "name"}
        actor = {name: options.pop(name, None) for name in ("ray_actor_options", "max_replicas_per_node")}
        config = DeploymentConfig.from_default(**options)
        versions.append(
            DeploymentVersion(get_app_code_version(schema), config, route_prefix=schema.route_prefix, **actor)
        )
    restarts = versions[0].requires_actor_restart(versions[1])
    assert isinstance(restarts, bool)
    return restarts


@pytest.mark.parametrize("edit", EDITS, ids=[f"{path.split('.', 2)[2]}={value}" for path, value in EDITS])
def test_an_effect_is_what_ray_serve_decides(edit: tuple[str, Any], tmp_path: Path) -> None:
    before, after = changed(tmp_path, edit)
    [*effects] = {it.effect for it in changes(load_app_config(before), load_app_config(after))}
    assert effects == [Effect.REPLACES if serve_restarts(before, after) else Effect.IN_PLACE]


def test_a_change_has_its_setting_and_both_values(tmp_path: Path) -> None:
    edits = ("applications.0.args.tensor_parallel_size", 3), ("applications.0.args.kv_cache", {"page-size": 32})
    by_key = {it.key: it for it in found(tmp_path, *edits)}
    assert by_key["tensor_parallel_size"] == Change("tensor_parallel_size", 2, 3, Effect.REPLACES)
    assert (by_key["kv_cache.page_size"].before, by_key["kv_cache.page_size"].after) == (16, 32)


def test_other_bounds_of_scaling_are_taken_over(tmp_path: Path) -> None:
    scaling = f"{ENGINE}.autoscaling_config"
    files = []
    for most in (2, 4):
        (folder := tmp_path / str(most)).mkdir()
        files.append(changed(folder, (scaling, {"min_replicas": 1, "max_replicas": most}))[1])
    before, after = files
    [change] = changes(load_app_config(before), load_app_config(after))
    assert (change.before, change.after, change.effect) == (2, 4, Effect.IN_PLACE)
    assert not serve_restarts(before, after)


def test_what_means_the_same_is_named_where_ray_serve_takes_it_for_another_text(tmp_path: Path) -> None:
    [change] = found(tmp_path, ("applications.0.args.attention", {"backend": "auto"}))
    assert (change.key, change.effect) == ("applications[0].args", Effect.REPLACES)
    assert not found(tmp_path, ("applications.0.route_prefix", "/"))
    assert not found(tmp_path)


def test_the_address_cannot_change_and_another_name_is_another_app(tmp_path: Path) -> None:
    [port] = found(tmp_path, ("http_options.port", 8001))
    assert port == Change("http_options.port", 8000, 8001, Effect.FIXED)
    [name] = found(tmp_path, ("applications.0.name", "other"))
    assert name.effect is Effect.NEW_APP


def test_check_says_what_a_file_would_change(tmp_path: Path) -> None:
    before, after = changed(tmp_path, (f"{ENGINE}.num_replicas", 3))
    result = run("check", str(after), "--against", str(before), "--set", "scheduler.max_num_seqs=8")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    begin = lines.index("2 changes to what runs")
    assert lines[begin + 1].split(maxsplit=1) == ["scheduler.max_num_seqs", "32 -> 8  replaces every replica"]
    assert lines[begin + 2].split() == ["applications[0].deployments[0].num_replicas", "-", "->", "3", "in", "place"]
    _, with_token = changed(tmp_path, ("applications.0.runtime_env", {"env_vars": {"HF_TOKEN": "hf_abc"}}))
    secret = run("check", str(with_token), "--against", str(before)).stdout
    assert "applications[0].runtime_env.env_vars.HF_TOKEN  - -> (not shown)  replaces every replica" in secret
    assert "hf_abc" not in secret
    same = run("check", str(before), "--against", str(before))
    assert same.stdout.splitlines()[-1] == "no changes to what runs"
