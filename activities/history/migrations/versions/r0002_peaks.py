"""The most that the nodes of a role have used of their machines."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds columns that rows of before leave empty."""
    op.add_column("roles", sa.Column("watched_seconds", sa.Float))
    op.add_column("roles", sa.Column("memory_bytes", sa.BigInteger))
    op.add_column("roles", sa.Column("cpu_cores", sa.Float))
    op.add_column("roles", sa.Column("gpu_memory_bytes", sa.BigInteger))
    op.add_column("roles", sa.Column("shm_bytes", sa.BigInteger))
