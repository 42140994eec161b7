"""Alembic's environment: works on the connection that `upgrade.py` hands over."""

from alembic import context

from steps.adapters.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
