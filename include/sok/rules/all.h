// The rules that are compiled in: a header each, and a line each below. Everything else reads this list.
#pragma once

#include "sok/rules/adagrad.h"
#include "sok/rules/adam.h"
#include "sok/rules/lazy_adam.h"
#include "sok/rules/sgd.h"

#define SOK_RULES(X) \
  X(Sgd)             \
  X(Adagrad)         \
  X(LazyAdam)        \
  X(Adam)
