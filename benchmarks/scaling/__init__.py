"""What choosing the number of nodes by speed brings: one job against its law, and many jobs of a cluster."""
