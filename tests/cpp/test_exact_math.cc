#include "sok/exact_math.h"

#include <cmath>
#include <limits>
#include <random>

#include "check.h"

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

bool IsNear(double got, long double truth) { return std::fabs((got - truth) / truth) < 3e-15L; }

}  // namespace

TEST(FunctionsAreNearTheTruth) {
  std::mt19937_64 rng(1);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  for (int i = 0; i < 20000; ++i) {
    const double x = std::exp(200.0 * unit(rng) - 100.0), y = 1400.0 * unit(rng) - 699.0, power = 4.0 * unit(rng) - 2.0;
    const double small = (2.0 * unit(rng) - 1.0) * std::exp(-20.0 * unit(rng));
    CHECK(x == 1.0 || IsNear(sok::ExactLog(x), logl(x)));
    const double near_one = 1.0 + small / 2;
    CHECK(near_one == 1.0 || IsNear(sok::ExactLog(near_one), logl(near_one)));
    CHECK(IsNear(sok::ExactExp(y), expl(y)));
    CHECK(IsNear(sok::ExactExpM1(small), expm1l(small)));
    CHECK(std::fabs(sok::ExactPow(x, power) / powl(x, power) - 1.0L) < 1e-13L);
    double sine, cosine;
    const double angle = static_cast<float>(8.0 * unit(rng)) * 0.999;
    sok::ExactSinCos(angle, &sine, &cosine);
    CHECK(IsNear(sine, sinl(angle)));
    CHECK(IsNear(cosine, cosl(angle)));
  }
}

// Any compiler and processor must give these. That a GPU does, test_cuda_initializer and test_cuda_sparse_update see.
TEST(BitsAreFixed) {
  double sine, cosine;
  sok::ExactSinCos(2.5, &sine, &cosine);
  CHECK_EQ(sok::ExactLog(10.0), 0x1.26bb1bbb55516p+1);
  CHECK_EQ(sok::ExactExp(10.0), 0x1.5829dcf95056p+14);
  CHECK_EQ(sok::ExactExpM1(-0.1), -0x1.85c933156a62cp-4);
  CHECK_EQ(sok::ExactPow(10.0, -0.3), 0x1.009b9cf334252p-1);
  CHECK_EQ(sine, 0x1.326af0dcfcabp-1);
  CHECK_EQ(cosine, -0x1.9a2f7ef858b7dp-1);
}

TEST(EdgesHaveTheirLimits) {
  CHECK_EQ(sok::ExactExp(-kInf), 0.0);
  CHECK_EQ(sok::ExactExp(-1e4), 0.0);
  CHECK_EQ(sok::ExactExp(1e4), kInf);
  CHECK_EQ(sok::ExactExp(0.0), 1.0);
  CHECK(std::isnan(sok::ExactExp(kNan)));
  CHECK_EQ(sok::ExactExpM1(0.0), 0.0);
  CHECK_EQ(sok::ExactLog(1.0), 0.0);
  CHECK_EQ(sok::ExactPow(0.0, 0.5), 0.0);
  CHECK_EQ(sok::ExactPow(0.0, -0.5), kInf);
  CHECK_EQ(sok::ExactPow(0.0, 0.0), 1.0);
  CHECK_EQ(sok::ExactPow(kInf, 0.5), kInf);
  CHECK_EQ(sok::ExactPow(kInf, -0.5), 0.0);
  CHECK_EQ(sok::ExactPow(kInf, 0.0), 1.0);
  CHECK(std::isnan(sok::ExactPow(-1.0, 0.5)));
  CHECK(std::isnan(sok::ExactPow(kNan, 0.5)));
}
