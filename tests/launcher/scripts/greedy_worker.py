"""A rank whose DataLoader worker needs more memory than the container has."""

from torch.utils.data import DataLoader, Dataset


class Large(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return len(bytearray(4 << 30))


for _ in DataLoader(Large(), num_workers=1):
    pass
