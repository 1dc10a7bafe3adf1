// The rules that are compiled in: a header each, and a line each below. Everything else reads this list.
#pragma once

#include "sok/rules/adadelta.h"
#include "sok/rules/adagrad.h"
#include "sok/rules/adam.h"
#include "sok/rules/adamax.h"
#include "sok/rules/adamw.h"
#include "sok/rules/amsgrad.h"
#include "sok/rules/ftrl.h"
#include "sok/rules/lazy_adam.h"
#include "sok/rules/lion.h"
#include "sok/rules/momentum.h"
#include "sok/rules/nadam.h"
#include "sok/rules/rmsprop.h"
#include "sok/rules/sgd.h"
#include "sok/rules/sgdw.h"

#define SOK_RULES(X)             \
  X(Sgd)                         \
  X(Adagrad)                     \
  X(LazyAdam)                    \
  X(Adam)                        \
  X(Momentum)                    \
  X(LazyMomentum)                \
  X(Rmsprop)                     \
  X(LazyRmsprop)                 \
  X(RmspropMomentum)             \
  X(LazyRmspropMomentum)         \
  X(RmspropCentered)             \
  X(LazyRmspropCentered)         \
  X(RmspropCenteredMomentum)     \
  X(LazyRmspropCenteredMomentum) \
  X(Adadelta)                    \
  X(LazyAdadelta)                \
  X(Adamax)                      \
  X(LazyAdamax)                  \
  X(Nadam)                       \
  X(LazyNadam)                   \
  X(Amsgrad)                     \
  X(LazyAmsgrad)                 \
  X(AdamW)                       \
  X(LazyAdamW)                   \
  X(Ftrl)                        \
  X(Lion)                        \
  X(LazyLion)                    \
  X(SgdW)                        \
  X(LazySgdW)
