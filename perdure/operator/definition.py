"""The definition of the resource at the API server, whose removal deletes every object.

`kubectl delete crd trainingjobs.perdure.dev` makes the API server request the deletion of all TrainingJobs of the
cluster. No user asked for that, so it ends no job: the operator compares each deletion with the definition's own.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Final

from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.operator.resource import GROUP, PLURAL, TrainingJobResource

logger = logging.getLogger("perdure.operator")

PATH: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"


class Definition:
    """The cluster's definition of TrainingJobs."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._may_read = True

    async def deletes(self, resource: TrainingJobResource) -> bool:
        """Whether the object is being deleted because the definition is, and not because a user deleted the object.

        An operator that may not read the definition cannot tell, and takes each deletion for a user's.

        Raises:
            KubernetesError: if the API server cannot say now.
        """
        requested = resource.metadata.deletion_timestamp
        if requested is None:
            return False
        try:
            found = await self._api.get(PATH)
        except KubernetesError as error:
            if not error.unauthorized:
                raise
            if self._may_read:
                logger.warning("the removal of the definition would end all jobs: it cannot be read: %s", error)
            self._may_read = False
            return False
        self._may_read = True
        if found is None:
            return True
        removed = found["metadata"].get("deletionTimestamp")
        # The API server deletes the objects after that. Both times are whole seconds.
        return removed is not None and datetime.fromisoformat(removed) <= requested
