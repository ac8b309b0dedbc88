"""Runs migrations for alembic, on the connection and in the transaction of `perdure.activities.history.store`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
