// Functions whose last bit math libraries disagree about, from additions, multiplications and divisions of float64 alone: the same
// bits on every processor, compiler and GPU (the build turns fused multiply-add off). Errors are below 1e-15 of the result, so
// what is rounded to float32 is nearly always the float next to the truth.
#pragma once

#include <cstdint>

#include "sok/philox.h"

namespace sok {

SOK_HOST_DEVICE uint64_t WordOfDouble(double x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  uint64_t word;
  __builtin_memcpy(&word, &x, sizeof(word));
  return word;
#endif
}
SOK_HOST_DEVICE double DoubleOfWord(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(word));  // NOLINT(google-runtime-int): its name for 64 bits
#else
  double x;
  __builtin_memcpy(&x, &word, sizeof(x));
  return x;
#endif
}

constexpr double kLn2High = 6.93147180369123816490e-01;  // its last 21 bits are 0: times an exponent it is exact
constexpr double kLn2Low = 1.90821492927058770002e-10;

// Natural logarithm of a normal number above 0: log of the mantissa m in [sqrt(1/2), sqrt(2)) by the series of
// 2 artanh((m - 1) / (m + 1)), whose argument is below 0.172.
SOK_HOST_DEVICE double ExactLog(double x) {
  const uint64_t word = WordOfDouble(x);
  int64_t exponent = static_cast<int64_t>(word >> 52) - 1023;
  double m = DoubleOfWord((word & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  constexpr double kSeries[] = {2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11,
                                2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3,  2.0};
  double p = 2.0 / 21;
  for (const double term : kSeries) p = p * z + term;
  const double e = static_cast<double>(exponent);
  return e * kLn2High + (s * p + e * kLn2Low);
}

// e^x - 1 by its series, |x| <= 1/2.
SOK_HOST_DEVICE double SmallExpM1(double x) {
  constexpr double kSeries[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0};
  double p = 1.0 / 6227020800;
  for (const double term : kSeries) p = p * x + term;
  return p * x;
}

// e^x. 0 below -700, where a float32 is 0 long since; infinite above 709; a NaN stays one.
SOK_HOST_DEVICE double ExactExp(double x) {
  if (x < -700.0) return 0.0;
  if (x > 709.0) return DoubleOfWord(0x7FF0000000000000ull);
  if (x != x) return x;
  const int64_t n = static_cast<int64_t>(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
  const double k = static_cast<double>(n), r = (x - k * kLn2High) - k * kLn2Low;
  return (1.0 + SmallExpM1(r)) * DoubleOfWord(static_cast<uint64_t>(n + 1023) << 52);
}

// e^x - 1, without the loss near 0.
SOK_HOST_DEVICE double ExactExpM1(double x) { return x > -0.5 && x < 0.5 ? SmallExpM1(x) : ExactExp(x) - 1.0; }

// x^power for x >= 0 that is normal or 0; as ExactExp where that is too large or small.
SOK_HOST_DEVICE double ExactPow(double x, double power) {
  if (x > 0.0 && x <= 1.7976931348623157e308) return ExactExp(power * ExactLog(x));
  if (!(x >= 0.0)) return DoubleOfWord(0x7FF8000000000000ull);  // no number
  if (power == 0.0) return 1.0;
  return (x == 0.0) == (power > 0.0) ? 0.0 : DoubleOfWord(0x7FF0000000000000ull);
}

// Sine and cosine of 0 <= x < 8.
SOK_HOST_DEVICE void ExactSinCos(double x, double* sine, double* cosine) {
  const int n = static_cast<int>(x * 0.63661977236758134 + 0.5);  // quarters of a turn
  // pi / 2 in two parts, the first of 33 bits, so that n times it is exact.
  const double r = (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11, z = r * r;
  // The series of sin(r) / r and cos(r), |r| <= pi / 4.
  constexpr double kSine[] = {-1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880,
                              -1.0 / 5040,          1.0 / 120,        -1.0 / 6,        1.0};
  constexpr double kCosine[] = {1.0 / 20922789888000,
                                -1.0 / 87178291200,
                                1.0 / 479001600,
                                -1.0 / 3628800,
                                1.0 / 40320,
                                -1.0 / 720,
                                1.0 / 24,
                                -1.0 / 2,
                                1.0};
  double s = 0.0, c = 0.0;
  for (const double term : kSine) s = s * z + term;
  for (const double term : kCosine) c = c * z + term;
  s *= r;
  *sine = (n & 1) == 0 ? s : c;
  *cosine = (n & 1) == 0 ? c : s;
  if ((n & 2) != 0) *sine = -*sine;
  if (((n + 1) & 2) != 0) *cosine = -*cosine;
}

}  // namespace sok
