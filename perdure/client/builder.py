"""Jobs that are built in Python, for programs that compute what a file would state.

The options are the specification's own fields, and its models check them: `spec_fields` is generated from those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, Unpack

from perdure.client.spec_fields import JobFields, RoleFields
from perdure.client.sync import SyncClient
from perdure.client.views import Submission
from perdure.spec.dump import dump_yaml
from perdure.spec.errors import SpecError, SpecProblem
from perdure.spec.job import JobSpec
from perdure.spec.load import SpecDocument
from perdure.spec.validate import validate_spec


class JobBuilder:
    """A job of one or several roles that is being built.

        job = (
            JobBuilder("grpo", env={"LOG_LEVEL": "info"}, limits={"active_deadline": timedelta(hours=8)})
            .role("reward", nodes=1, command=["python", "reward.py"], ready={"port": 9000})
            .role("trainer", nodes="2:4", command=["torchrun", "grpo.py"], depends_on={"reward": "ready"})
        )
        job.submit()

    Options are the fields of docs/spec.md, with their names; durations are `timedelta`. A relative `workdir` begins in
    the current directory, which is also the default where a file's own folder would be.
    """

    def __init__(self, name: str, **fields: Unpack[JobFields]) -> None:
        """Begins a job.

        Args:
            name: The name of the job.
            fields: Its other fields, such as `backend` and `retry`, but its roles.
        """
        self._data: dict[str, Any] = {"name": name, **fields, "roles": {}}

    def role(self, name: str, **fields: Unpack[RoleFields]) -> Self:
        """Adds a role.

        Args:
            name: The name of the role, such as `trainer`.
            fields: Its fields; `nodes` and `command` are required.

        Raises:
            SpecError: if the job has a role of this name.
        """
        roles = self._data["roles"]
        if name in roles:
            raise SpecError(
                [SpecProblem(location=("roles", name), message="is there already", hint="rename one of them")]
            )
        roles[name] = fields
        return self

    def options(self, **fields: Unpack[JobFields]) -> Self:
        """Sets fields of the job, such as those that depend on a condition; they replace the former ones.

        Args:
            fields: The fields, as when the job was begun.
        """
        self._data |= fields
        return self

    def build(self) -> JobSpec:
        """Returns the specification, as a file with `to_yaml` gives it.

        Raises:
            SpecError: with all errors: fields and values, and those that the backend or this release does not support.
        """
        spec, _ = validate_spec(self._document())
        return spec

    def submit(self, *, address: str | None = None) -> Submission:
        """Starts the job, and blocks until it has started; `await Client.submit(builder.build())` does not block.

        Args:
            address: The address of the Temporal server; by default as for `Client`.

        Raises:
            SpecError: if the specification is wrong, or its folder cannot be uploaded.
            JobAlreadyRunning: if a job of that name runs.
            NoWorker: if a folder has to be uploaded and no worker takes it.
        """
        with SyncClient(address=address) as client:
            return client.submit(self.build())

    def to_yaml(self) -> str:
        """Returns the job's file, for `perdure run` and for version control.

        Raises:
            SpecError: as `build` does.
        """
        self.build()
        return dump_yaml(self._document())

    def _document(self) -> dict[str, Any]:
        document = SpecDocument(data=self._data, lines={}, folder=Path.cwd()).with_workdir()
        return document.data
