"""How many replicas the load asks for, which of them a session goes to, and where the config file says so."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from cluster.serve.autoscaling import KV_USAGE, QUEUED_TOKENS, RUNNING_SHARE, LoadPolicy
from cluster.serve.deployment import _engine_options
from cluster.serve.replicas import replica_options
from cluster.serve.routing import SessionRouter, favourite_of
from configs.errors import ConfigError
from configs.load import load_app_config, parse_engine_config
from configs.resolve import check_settings

ROOT = Path(__file__).resolve().parent.parent
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


# --- Sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_replica_and_sessions_are_spread_evenly() -> None:
    replicas = [f"replica{i}" for i in range(4)]
    sessions = [f"session-{i}" for i in range(4000)]
    before = {session: favourite_of(session, replicas) for session in sessions}
    counts = Counter(before.values())
    assert set(counts) == set(replicas)
    assert max(counts.values()) < 1.15 * min(counts.values())
    assert before == {session: favourite_of(session, reversed(replicas)) for session in sessions}
    # One more replica takes a fifth, and only to itself; one less gives away only what it had.
    more = {session: favourite_of(session, [*replicas, "replica4"]) for session in sessions}
    moved = {session for session in sessions if more[session] != before[session]}
    assert {more[session] for session in moved} == {"replica4"}
    assert 0.15 < len(moved) / len(sessions) < 0.25
    less = {session: favourite_of(session, replicas[1:]) for session in sessions}
    assert all(less[session] == before[session] for session in sessions if before[session] != "replica0")


def choose(lengths: dict[str, int], session: str, **kwargs: Any) -> list[list[str]]:
    """Groups of replicas that the router names for a request, of four replicas.

    Args:
        lengths: Serve's cache of how many requests each has; what it lacks was not heard of lately.
    """
    names = ["a", "b", "c", "d"]
    replicas: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    router = SessionRouter.__new__(SessionRouter)
    by_name = SimpleNamespace(get=lambda replica_id: lengths.get(replica_id.unique_id))
    router._replica_queue_len_cache = by_name  # type: ignore[assignment]
    router.initialize_state(**kwargs)
    request: Any = SimpleNamespace(
        metadata=SimpleNamespace(session_id=session), routing_context=SimpleNamespace(should_backoff=False)
    )
    groups = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    return [[replica.replica_id.unique_id for replica in group] for group in groups]


def test_a_session_goes_to_its_replica_first_and_others_to_two_that_are_drawn() -> None:
    favourite = favourite_of("s", "abcd")
    for lengths in ({}, dict.fromkeys("abcd", 100)):
        first, second = choose(lengths, "s")
        assert first == [favourite]
        assert len(set(second)) == 2
    drawn = [choose({}, "") for _ in range(200)]
    assert {len(groups) for groups in drawn} == {1}
    assert len({frozenset(group) for [group] in drawn}) == 6


def test_a_favourite_that_is_far_busier_than_another_is_left_to_the_draw() -> None:
    favourite = favourite_of("s", "abcd")
    other = next(name for name in "abcd" if name != favourite)
    assert choose({favourite: 16, other: 0}, "s")[0] == [favourite]
    assert len(choose({favourite: 17, other: 0}, "s")) == 1
    assert len(choose({favourite: 17, other: 0}, "s", max_lead=20)) == 2
    assert choose({other: 50}, "s")[0] == [favourite]  # not heard of lately: Serve asks it


def test_what_a_replica_keeps_is_its_own_however_busy_it_is() -> None:
    for name in "abcd":
        assert choose({name: 1000, "a": 3}, f"replica-{name}") == [[name]]
    assert len(choose({}, "replica-gone")) == 2  # any session's


@pytest.mark.parametrize("kwargs", [{"max_lead": 0}, {"max_lead": "16"}, {"max_lead": True}, {"lead": 4}])
def test_wrong_settings_of_the_router_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_lead"):
        choose({}, "s", **kwargs)


# --- The config file --------------------------------------------------------------------------------------------------


def options_of(**settings: Any) -> dict[str, Any]:
    return replica_options(parse_engine_config({"model": "m", **settings}))


def test_the_example_gives_ray_serve_our_policy_and_router_where_our_packages_are_not() -> None:
    options = replica_options(load_app_config(EXAMPLE).engine)
    scaling, router = options["autoscaling_config"], options["request_router_config"]
    assert (scaling.min_replicas, scaling.max_replicas, scaling.upscale_delay_s) == (1, 2, 5)
    assert scaling.policy.policy_function == "cluster.serve.autoscaling:LoadPolicy"
    assert scaling.policy.policy_kwargs["target_queued_tokens"] == 2048
    blobs = (scaling.policy.get_serialized_policy_def(), router.get_serialized_request_router_cls())
    # As the controller and the proxies read them: by value, in a process that finds nothing of ours.
    script = (
        "import pickle, sys; sys.path = [p for p in sys.path if p not in ('', '.')]\n"
        "import importlib.util; assert importlib.util.find_spec('configs') is None\n"
        "for blob in pickle.load(sys.stdin.buffer): print(pickle.loads(blob).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(blobs), capture_output=True, cwd="/", check=True, timeout=60
    )
    assert done.stdout.decode().split() == ["LoadPolicy", "SessionRouter"]


def test_one_replica_needs_no_router_and_several_have_ours_but_behind_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of() == {"num_replicas": 1}
    assert set(options_of(num_replicas=2)) == {"num_replicas", "request_router_config"}
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert set(options_of(num_replicas=2)) == {"num_replicas"}


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
    with pytest.raises(ConfigError, match="names Server; the application has one deployment, Engine"):
        _engine_options({"args": {}, "deployments": [{"name": "Server", "num_replicas": 2}]})
    assert _engine_options({"args": {}}) == {}
