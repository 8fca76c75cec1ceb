"""The policies that callers announced for their rollouts that are not on a stream."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from rollout_server.core.error import Busy
from rollout_server.core.spec import Dialect
from rollout_server.runtime.policy import AnnouncedPolicy, PolicyUpdate
from rollout_server.runtime.rollout import Rollout

_log = logging.getLogger(__name__)
MOST_ENDPOINTS: Final = 1000
"""Endpoints for which one caller can have announced policies."""
_ALL: Final = ""
_NONE: Final = AnnouncedPolicy()


class AnnouncedPolicies:
    """The announcements of all callers, and the unfinished rollouts that they concern. Lives on one event loop.

    Both are stored by caller and by the URL of the endpoint that generates. What a caller announced for all endpoints has the empty
    URL. An announcement for a URL takes precedence over one for all. Of more than `MOST_ENDPOINTS`, the oldest one is forgotten
    that has no unfinished rollouts and is not paused.
    """

    def __init__(self) -> None:
        self._policies: dict[str, dict[str, AnnouncedPolicy]] = {}
        self._rollouts: defaultdict[str, defaultdict[str, dict[str, Rollout]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, rollout: Rollout) -> None:
        """Apply earlier announcements to a new rollout, and later ones until `remove`."""
        target = rollout.spec.completions
        if target.dialect is not Dialect.STREAM:
            self._rollouts[rollout.caller][target.url][rollout.uid] = rollout
            rollout.announce(self._effective(rollout.caller, target.url))

    def remove(self, rollout: Rollout) -> None:
        """Forget a rollout that has ended. Has no effect on one that was not added."""
        caller, url = rollout.caller, rollout.spec.completions.url
        self._rollouts[caller][url].pop(rollout.uid, None)
        if not self._rollouts[caller][url]:
            del self._rollouts[caller][url]
        if not self._rollouts[caller]:
            del self._rollouts[caller]

    def announce(self, caller: str, update: PolicyUpdate, url: str = _ALL) -> Sequence[str]:
        """Apply an announcement to the caller's rollouts with this completion URL; empty: to those of all URLs.

        Returns the uids of the rollouts that are cancelled because they are stale. Raises `InvalidRequest`, and `Busy` if the
        caller has announced policies for too many URLs. Where no rollout is unfinished, the step may decrease: a training that
        begins again from an older checkpoint announces lower steps.
        """
        own = self._policies.get(caller, {})
        rollouts: Mapping[str, Mapping[str, Rollout]] = self._rollouts.get(caller, {})
        policy = own.get(url, _NONE).updated(update, unused=not (url in rollouts if url else rollouts))
        if url and url not in own and len(own) - (_ALL in own) >= MOST_ENDPOINTS:
            self._forget_unused(caller)
        own.pop(url, None)  # so that the dictionary has the order of the announcements
        self._policies.setdefault(caller, own)[url] = policy
        concerned = ((self._effective(caller, each), rollouts.get(each, {})) for each in ([url] if url else rollouts))
        cancelled = [uid for now, of_url in concerned for uid, rollout in of_url.items() if rollout.announce(now)]
        text = "caller %s announced a policy for %s: version %r, step %s%s; %d stale rollouts are cancelled"
        paused = ", sampling is paused" if update.paused else ""
        _log.info(text, caller, "one endpoint" if url else "all", update.version, update.step, paused, len(cancelled))
        return cancelled

    def _forget_unused(self, caller: str) -> None:
        own, used = self._policies[caller], {*self._rollouts.get(caller, ())}
        unused = (url for url, policy in own.items() if url and url not in used and not policy.paused)
        forgotten = next(unused, None)
        if forgotten is None:
            text = (
                f"you have announced policies for {MOST_ENDPOINTS} values of completions_url that are paused or have unfinished "
                "rollouts; leave completions_url empty to announce one policy for all"
            )
            raise Busy(text, retry_after=60.0, reason="TOO_MANY_ENDPOINTS")
        del own[forgotten]

    def _effective(self, caller: str, url: str) -> AnnouncedPolicy:
        own = self._policies.get(caller, {})
        for_all = own.get(_ALL, _NONE)
        return own[url].over(for_all) if url in own else for_all
