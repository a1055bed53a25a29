"""How many replicas the load asks for, and where the config file says so."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from cluster.serve.autoscaling import KV_USAGE, QUEUED_TOKENS, RUNNING_SHARE, LoadPolicy
from cluster.serve.deployment import _engine_options
from cluster.serve.replicas import replica_options
from configs.errors import ConfigError
from configs.load import load_app_config, parse_engine_config
from configs.resolve import check_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs" / "smollm2-135m-replicas.yaml"


def wanted(policy: LoadPolicy, *replicas: dict[str, float], target: int = 1) -> float:
    """Replicas that `policy` wants where each of `replicas` reports these figures."""
    names = {name for figures in replicas for name in figures}
    aggregated = {name: {f"r{i}": f[name] for i, f in enumerate(replicas) if name in f} for name in names}
    fields: dict[str, Any] = dict.fromkeys(AutoscalingContext.__init__.__annotations__, None)
    fields.pop("return", None)
    context = AutoscalingContext(
        **{**fields, "aggregated_metrics": aggregated, "target_num_replicas": target, "policy_state": {}}
    )
    number, state = policy(context)
    assert state == {}
    return number


def test_replicas_follow_the_scarcest_of_the_three_figures() -> None:
    policy = LoadPolicy(target_queued_tokens=1000, target_kv_usage=0.8, target_running=0.9)
    idle = {QUEUED_TOKENS: 0.0, KV_USAGE: 0.0, RUNNING_SHARE: 0.0}
    assert wanted(policy, idle) == 0  # Ray Serve's min_replicas is the bound
    assert wanted(policy, {**idle, KV_USAGE: 0.4}) == pytest.approx(0.5)
    assert wanted(policy, {**idle, KV_USAGE: 0.9, RUNNING_SHARE: 0.5}) == pytest.approx(1.125)
    assert wanted(policy, {**idle, RUNNING_SHARE: 1.0, KV_USAGE: 0.1}) == pytest.approx(1 / 0.9)
    assert wanted(policy, {**idle, QUEUED_TOKENS: 3500.0, RUNNING_SHARE: 1.0}) == pytest.approx(3.5)
    # Of two: what they have together, however it is spread.
    assert wanted(policy, {**idle, QUEUED_TOKENS: 3000.0}, idle) == pytest.approx(3)
    assert wanted(policy, {**idle, KV_USAGE: 0.3}, {**idle, KV_USAGE: 0.3}) == pytest.approx(0.75)


def test_what_has_not_reported_changes_nothing() -> None:
    assert wanted(LoadPolicy(), target=3) == 3
    assert wanted(LoadPolicy(target_queued_tokens=10), {QUEUED_TOKENS: 15.0}, {}) == 1.5


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"target_kv_usage": 80}, r"target_kv_usage=80 must be above 0 and at most 1"),
        ({"target_running": 0}, r"target_running=0 must"),
        ({"target_queued_tokens": -1}, r"target_queued_tokens=-1 must be above 0"),
    ],
)
def test_targets_out_of_range_are_refused(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadPolicy(**kwargs)


# --- The config file --------------------------------------------------------------------------------------------------


def options_of(**settings: Any) -> dict[str, Any]:
    return replica_options(parse_engine_config({"model": "m", **settings}))


def test_the_example_gives_ray_serve_our_policy_where_our_packages_are_not() -> None:
    options = replica_options(load_app_config(EXAMPLE).engine)
    scaling = options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas, scaling.upscale_delay_s) == (1, 2, 5)
    assert scaling.policy.policy_function == "cluster.serve.autoscaling:LoadPolicy"
    assert scaling.policy.policy_kwargs["target_queued_tokens"] == 2048
    blobs = (scaling.policy.get_serialized_policy_def(),)
    # As the controller reads it: by value, in a process that finds nothing of ours.
    script = (
        "import pickle, sys; sys.path = [p for p in sys.path if p not in ('', '.')]\n"
        "import importlib.util; assert importlib.util.find_spec('configs') is None\n"
        "for blob in pickle.load(sys.stdin.buffer): print(pickle.loads(blob).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(blobs), capture_output=True, cwd="/", check=True, timeout=60
    )
    assert done.stdout.decode().split() == ["LoadPolicy"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"max_replica": 2}, "unknown keys: max_replica; Ray Serve knows .*max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, r"max_replicas \(2\) must be greater"),
        ({"policy": {"policy_kwargs": {"target_kv_usage": 8}}}, "target_kv_usage=8 must be above 0 and at most 1"),
        ({"policy": {"policy_kwargs": {"target": 1}}}, "unexpected keyword argument 'target'"),
        ({"policy": {"policy_function": "nowhere:policy"}}, "No module named 'nowhere'"),
    ],
)
def test_a_wrong_section_is_refused_before_anything_is_placed(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"autoscaling_config.*{message}"):
        options_of(autoscaling_config=section)


def test_replicas_are_given_once() -> None:
    with pytest.raises(ConfigError, match="num_replicas=2 and autoscaling_config are both set"):
        check_settings(parse_engine_config({"model": "m", "num_replicas": 2, "autoscaling_config": {}}))
    deployments = [{"name": "Engine", "autoscaling_config": {"max_replicas": 2}}]
    for key, value in (("num_replicas", 2), ("autoscaling_config", {})):
        with pytest.raises(ConfigError, match=rf"both args\.{key} and deployments\[0\]\.autoscaling_config"):
            _engine_options({"args": {key: value}, "deployments": deployments})


def test_options_of_a_deployment_that_does_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="names Server; name only its one deployment, Engine"):
        _engine_options({"args": {}, "deployments": [{"name": "Server", "num_replicas": 2}]})
    assert _engine_options({"args": {}}) == {}
