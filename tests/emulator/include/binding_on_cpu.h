// Makes the bindings take CPU tensors in place of CUDA tensors: included before everything else.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#define CUDA CPU
#define is_cuda is_cpu
#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
