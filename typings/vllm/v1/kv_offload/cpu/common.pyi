import numpy as np
import numpy.typing as npt

from ..base import BlockIDsLoadStoreSpec

class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    @property
    def chunk_ids(self) -> npt.NDArray[np.int32]: ...
