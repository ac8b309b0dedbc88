"""What the gateway costs: a thousand agents through one gateway process, beside agents that connect to Temporal."""
