"""accelerate, as its users write it: `Accelerator.prepare`, and a state that is saved once and resumed from."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
state = Path(os.environ["TEST_STEPS_DIR"]) / "state"
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
saved = state.exists()
if saved:
    accelerator.load_state(str(state))
    accelerator.print("resumes from what was saved")
step = 0
while True:
    for inputs, targets in data:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        step += 1
        if step == 2 and not saved:
            accelerator.save_state(str(state))
