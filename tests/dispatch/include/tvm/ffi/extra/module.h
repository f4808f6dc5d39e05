#pragma once
#include "tvm_ffi_utils.h"
