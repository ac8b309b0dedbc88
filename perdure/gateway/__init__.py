"""The gateway: the only part of the control plane that agents in pods reach.

It speaks Temporal's own protocol, so that agents use Temporal's SDK, and passes on only what an agent needs: the calls
in `calls.py`, each checked against the grant of the caller. Temporal's address and credentials stay on this side.

The gateway keeps no state. It can be killed or replaced at any time; agents connect to another replica, and until then
training continues, as it does without Temporal.
"""
