"""Jobs with their roles, worlds and incidents, and how far they are recorded."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NAME = sa.String(400)
_TEXT = sa.String(1000)
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "jobs",
        sa.Column("tenant", _NAME, primary_key=True),
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("execution", sa.String(64), nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
        sa.Column("namespace", _NAME, nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("uid", sa.String(16), nullable=False),
        sa.Column("backend", sa.String(64), nullable=False),
        sa.Column("owner", _NAME, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("phase", sa.String(64), nullable=False),
        sa.Column("reason", _TEXT, nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("finished_at", _TIME),
        sa.Column("worlds", sa.Integer, nullable=False),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("step", sa.BigInteger),
    )
    op.create_index("jobs_by_name", "jobs", ["tenant", "namespace", "name"])
    op.create_index("jobs_by_end", "jobs", ["tenant", "finished_at"])
    op.create_table(
        "roles",
        sa.Column("tenant", _NAME, primary_key=True),
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("role", _NAME, primary_key=True),
        sa.Column("image", _NAME, nullable=False),
        sa.Column("command", _NAME, nullable=False),
    )
    op.create_index("roles_by_image", "roles", ["tenant", "image"])
    op.create_index("roles_by_command", "roles", ["tenant", "command"])
    op.create_table(
        "worlds",
        sa.Column("tenant", _NAME, primary_key=True),
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("role", _NAME, primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME),
        sa.Column("steps", sa.BigInteger),
        sa.Column("step_seconds", sa.Float),
    )
    op.create_table(
        "incidents",
        sa.Column("tenant", _NAME, primary_key=True),
        sa.Column("run", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("role", _NAME, nullable=False),
        sa.Column("title", _TEXT, nullable=False),
        sa.Column("failure", sa.String(64)),
        sa.Column("host", _NAME, nullable=False),
        sa.Column("node", sa.Integer),
        sa.Column("rule", _NAME, nullable=False),
        sa.Column("action", _TEXT, nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("lost_seconds", sa.Float),
    )
    op.create_index("incidents_by_host", "incidents", ["tenant", "host"])
    op.create_table(
        "cursors",
        sa.Column("tenant", _NAME, primary_key=True),
        sa.Column("task_queue", _NAME, primary_key=True),
        sa.Column("complete_until", _TIME, nullable=False),
    )
