"""One torch thread: the tensors are tiny, and threads that wait for each other dominate the run time."""

import torch

torch.set_num_threads(1)
