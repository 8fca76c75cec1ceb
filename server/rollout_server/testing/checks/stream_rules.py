"""The rules of trainer_service.proto for a server on a stream, which a strict trainer checks item by item. No I/O."""

from osmosis.rollout.v1.trainer_service_pb2 import TrainResponse, TrainWelcome

_NUMBERED = frozenset({"started", "refused", "ask", "outcome"})


class TrainRules:
    """Checks the server's items of one stream. `credit` is the maximum number of pending completion requests.

    Attributes:
        faults: the violations found, in order.
        seen: sequence number of the last numbered item received.
        under_way: the pending completion requests, as uid by turn key.
    """

    def __init__(self, credit: int) -> None:
        self.faults: list[str] = []
        self.seen = 0
        self.under_way: dict[str, str] = {}
        self._credit = credit
        self._resumed = False
        self._expected_spans: list[str] = []
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._acknowledged = 0

    def begin(self, welcome: TrainWelcome, stream_id: str, sent: int) -> None:
        """Check the `welcome` of a connection. `stream_id`: the requested stream; `sent`: number of numbered items sent so far."""
        self._resumed = bool(stream_id)
        if not welcome.stream_id or (stream_id and welcome.stream_id != stream_id):
            self.faults.append(f"welcome: the stream is {welcome.stream_id!r}, requested was {stream_id!r}")
        if not self._acknowledged <= welcome.last_seen <= sent:
            self.faults.append(
                f"welcome: last_seen is {welcome.last_seen}, {sent} items were sent and {self._acknowledged} acknowledged"
            )

    def expect_started(self, rollout_ids: list[str]) -> None:
        """Record that a start was sent for these rollouts, which must be started in this order."""
        self._expected_spans += rollout_ids

    def end_request(self, turn_key: str) -> None:
        """Record that a completion request was answered or rejected."""
        self.under_way.pop(turn_key, None)

    def take(self, item: TrainResponse, sent: int) -> bool:
        """Check an item and return whether it is new."""
        kind = item.WhichOneof("item") or "nothing"
        if (kind in _NUMBERED) is not bool(item.sequence):
            self.faults.append(f"{kind}: has sequence {item.sequence}")
        if item.sequence and item.sequence <= self.seen:
            self.faults.append(f"{kind}: item {item.sequence} was sent again, after item {self.seen}")
            return False
        if item.sequence > self.seen + 1 and not self._resumed:
            self.faults.append(f"{kind}: item {item.sequence} follows item {self.seen}")
        self.seen = item.sequence or self.seen
        self._check_item(kind, item, sent)
        return True

    def _check_item(self, kind: str, item: TrainResponse, sent: int) -> None:
        match kind:
            case "welcome":
                self.faults.append("welcome: was sent again")
            case "started":
                self._check_started(item)
            case "acknowledge":
                if not self._acknowledged <= item.acknowledge.sequence <= sent:
                    self.faults.append(
                        f"acknowledge: {item.acknowledge.sequence} after {self._acknowledged}, {sent} items were sent"
                    )
                self._acknowledged = item.acknowledge.sequence
            case "ask":
                self._check_rollout(kind, item.ask.uid)
                self._check_completion(item)
            case "event":
                self._check_rollout(kind, item.event.uid)
            case "outcome":
                uid = item.outcome.rollout.uid
                self._check_rollout(kind, uid)
                self._ended.add(uid)
                self.under_way = {key: owner for key, owner in self.under_way.items() if owner != uid}

    def _check_started(self, item: TrainResponse) -> None:
        rollout = item.started.rollout
        wanted = self._expected_spans.pop(0) if self._expected_spans else None
        if rollout.spec.rollout_id != wanted:
            self.faults.append(f"started: {rollout.spec.rollout_id!r}, but {wanted!r} is next")
        self._running.add(rollout.uid)

    def _check_rollout(self, kind: str, uid: str) -> None:
        if uid not in self._running:
            self.faults.append(f"{kind}: rollout {uid!r} was not started on this stream")
        if uid in self._ended:
            self.faults.append(f"{kind}: was sent for rollout {uid!r} after its outcome")

    def _check_completion(self, item: TrainResponse) -> None:
        key = item.ask.turn_key
        if key in self.under_way:
            self.faults.append(f"ask: {key!r} is already pending")
        self.under_way[key] = item.ask.uid
        if len(self.under_way) > self._credit:
            self.faults.append(f"ask: {len(self.under_way)} are pending, but the credit is {self._credit}")

    def drop_expected(self, rollout_ids: list[str]) -> None:
        """Record that the start of these rollouts was refused."""
        self._expected_spans = [each for each in self._expected_spans if each not in rollout_ids]
