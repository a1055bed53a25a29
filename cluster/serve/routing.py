"""Chooses the replica that a request goes to, where there are several.

The turns of a conversation share a prefix, whose KV pages lie in the replica that answered the last one. Ray Serve
routes a request by its head, by the session named in the header `x-session-id` (RAY_SERVE_SESSION_ID_HEADER_KEY names
another): a client says there which conversation it is, and for one that does not, the proxy names how its prompt
begins (`cluster/http/edge.py`). Every proxy comes to the same replica without knowing of the others. Ray refuses such a
router where HAProxy is its proxy.

Proxies run it, where our packages need not be: of them it uses one text, which is pickled with it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.http.affinity import REPLICA_SESSION


class SessionRouter(RequestRouter):
    """Chooses one replica for every request of a session, unless it is much busier than the least busy one.

    Then, and for requests without a session, the less busy of two that are drawn.
    """

    # Serve asks a replica of which it has not heard for ten seconds how busy it is. A session's own is worth waiting
    # for: another one would compute the whole prefix again.
    queue_len_response_deadline_s = 0.5

    _max_lead = 16

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes `request_router_kwargs`.

        Args:
            kwargs: `max_lead`: requests that a session's replica may have more than the least busy one.

        Raises:
            ValueError: it is no positive integer, or there is something else.
        """
        max_lead = kwargs.pop("max_lead", self._max_lead)
        if kwargs:
            raise ValueError(f"request_router_kwargs has unknown keys: {', '.join(kwargs)}; it takes max_lead")
        if isinstance(max_lead, bool) or not isinstance(max_lead, int) or max_lead < 1:
            raise ValueError(f"max_lead={max_lead!r} must be an integer of at least 1")
        self._max_lead = max_lead

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the preferred one first; Serve takes the least busy of the first that has room."""
        if not candidate_replicas:
            return []
        drawn = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [drawn]
        pending_request.routing_context.should_backoff = True
        session = pending_request.metadata.session_id
        if not session:
            return [drawn]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if session.startswith(REPLICA_SESSION) and session.removeprefix(REPLICA_SESSION) in by_name:
            return [[by_name[session.removeprefix(REPLICA_SESSION)]]]
        favourite = by_name[favourite_of(session, by_name)]
        return [drawn] if self._is_too_busy(favourite.replica_id, candidate_replicas) else [[favourite], drawn]

    def _is_too_busy(self, favourite: ReplicaID, candidates: Iterable[RunningReplica]) -> bool:
        lengths = self.replica_queue_len_cache
        ongoing = lengths.get(favourite)
        known = [length for each in candidates if (length := lengths.get(each.replica_id)) is not None]
        # Serve asks a replica that was not heard of lately before it sends.
        return ongoing is not None and ongoing - min(known) > self._max_lead


def favourite_of(session: str, replicas: Iterable[str]) -> str:
    """The replica of a session: the one with the highest hash of both names.

    One more replica takes sessions only to itself, and one less gives away only its own.
    """

    def weight(replica: str) -> bytes:
        return hashlib.blake2b(f"{replica}\0{session}".encode(), digest_size=8).digest()

    return max(replicas, key=weight)
