"""What the control plane hands out so that its agents can prove themselves: signed grants, and the certificates by
which agents recognize the gateway.

One key ring, kept in a Secret, holds all of it. It is the only state of the gateway.
"""
