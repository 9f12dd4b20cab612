"""
[en
Before you train: how many bytes will a step need, and how large a batch fits?

The model is Linear, ReLU, Linear, ReLU … Linear in fp32, with biases; sizes [64, 256, 10] is two layers, 64 → 256 → 10.
The loss is cross entropy over the last size.
en]
[zh
训练之前先算：一步需要多少字节？批次最大能有多大？

模型是 fp32 的 Linear、ReLU、Linear、ReLU …… Linear，带偏置；sizes [64, 256, 10] 表示两层，64 → 256 → 10。
损失是对最后一个大小的交叉熵。
zh]
"""

MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}  # tensors of the size of the parameters


# TODO(en): Bytes of parameters, gradients and optimizer state together.
# TODO(zh): 参数、梯度、优化器状态合计多少字节。
def state_bytes(sizes: list[int], optimizer: str) -> int:
    # [skeleton
    #: return 0
    # skeleton]
    # [solution
    parameters = sum(i * o + o for i, o in zip(sizes[:-1], sizes[1:], strict=True))
    return 4 * parameters * (2 + MOMENTS[optimizer])
    # solution]


# TODO(en): Bytes that autograd saves between forward and backward, parameters apart. A Linear saves its input. A ReLU saves its
#   output, which is the next Linear's input: the same tensor, saved once. Cross entropy saves log-softmax, as large as the
#   logits, and the labels (int64).
# TODO(zh): autograd 在前向和反向之间保存的字节数，参数除外。Linear 保存它的输入。ReLU 保存它的输出，
#   那正是下一个 Linear 的输入：同一个张量，只保存一次。交叉熵保存与 logits 一样大的 log-softmax，以及标签（int64）。
def activation_bytes(sizes: list[int], batch: int) -> int:
    # [skeleton
    #: return 0
    # skeleton]
    # [solution
    return batch * (4 * sum(sizes[:-1]) + 4 * sizes[-1] + 8)
    # solution]


# TODO(en): The largest batch whose state and activations fit into ``limit`` bytes; 0 if none does.
# TODO(zh): 状态和激活值一起放得进 ``limit`` 字节的最大批次；一个样本也放不下时为 0。
def largest_batch(sizes: list[int], optimizer: str, limit: int) -> int:
    # [skeleton
    #: return 0
    # skeleton]
    # [solution
    return max(0, limit - state_bytes(sizes, optimizer)) // activation_bytes(sizes, 1)
    # solution]


# I AM NOT DONE
