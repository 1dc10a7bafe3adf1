// Keys that an attacker would choose: hashes run backwards, and patterns that weak hashes map to one place.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "sok/hash_key.h"

// The y for which y ^ (y >> shift) is x.
inline uint64_t UndoShift(uint64_t x, int shift) {
  uint64_t y = x;
  for (int known = shift; known < 64; known += shift) y = x ^ (y >> shift);
  return y;
}

// The factor that undoes an odd one, modulo 2^64: each step doubles the bits that are right.
inline uint64_t Inverse(uint64_t odd) {
  uint64_t inverse = odd;
  for (int step = 0; step < 6; ++step) inverse *= 2 - odd * inverse;
  return inverse;
}

// The key whose hash is `hash`, if the seed is known.
inline uint64_t KeyOfHash(uint64_t hash, uint64_t seed = 0) {
  hash = UndoShift(hash, 31) * Inverse(0x94D049BB133111EBull);
  hash = UndoShift(hash, 27) * Inverse(0xBF58476D1CE4E5B9ull);
  return UndoShift(hash, 30) ^ seed;
}

// The same of the hash that Numbering has.
inline uint64_t KeyOfNumberingHash(uint64_t hash, uint64_t seed = 0) {
  hash = UndoShift(hash * Inverse(0x9E3779B97F4A7C15ull), 29);
  return UndoShift(hash * Inverse(0xD6E8FEB86659FD93ull), 32) ^ seed;
}

template <class F>
std::vector<uint64_t> KeysBy(uint64_t n, F key_of) {
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < n; ++i) keys.push_back(key_of(i));
  return keys;
}

struct ChosenKeys {
  const char* name;
  std::vector<uint64_t> keys;
};

// Distinct keys against tables whose seed is 0: of one place by the low or by the high bits of the hash, whatever the number of
// places; of one segment; of both. And strided ones.
inline std::vector<ChosenKeys> AllChosenKeys(uint64_t n) {
  return {{"low bits of the hash", KeysBy(n, [](uint64_t i) { return KeyOfHash(i << 32); })},
          {"high bits of the hash", KeysBy(n, [](uint64_t i) { return KeyOfHash(i); })},
          {"one segment", KeysBy(n, [](uint64_t i) { return KeyOfHash(i * 0x9E3779B97F4A7C15ull >> 16); })},
          {"one segment and low bits", KeysBy(n, [](uint64_t i) { return KeyOfHash(i << 32 & ~uint64_t{0} >> 12); })},
          {"low bits of Numbering's", KeysBy(n, [](uint64_t i) { return KeyOfNumberingHash(i << 24); })},
          {"high bits of Numbering's", KeysBy(n, [](uint64_t i) { return KeyOfNumberingHash(i); })},
          {"strides of 2^44", KeysBy(n, [](uint64_t i) { return i << 44 | i >> 20; })},
          {"two strides", KeysBy(n, [](uint64_t i) { return i << 46 | i << 14; })}};
}

inline std::vector<uint64_t> RandomKeys(uint64_t n) {
  std::mt19937_64 random(7);
  return KeysBy(n, [&](uint64_t) { return random(); });
}
