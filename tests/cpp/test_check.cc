// The judge is judged: each check sees a failure.
#include <stdexcept>

#include "check.h"

namespace {

// Runs the check and gives how many failures it counted, which then do not count.
template <class Body>
int FailuresOf(Body body) {
  const int before = check::failures;
  body();
  const int seen = check::failures - before;
  check::failures = before;
  return seen;
}

void Throw() { throw std::runtime_error("no room for key 7"); }
void DoNotThrow() {}

}  // namespace

TEST(ChecksSeeFailures) {
  const int wrong = FailuresOf([] { CHECK(1 + 1 == 3); }) + FailuresOf([] { CHECK_EQ(1 + 1, 3); }) +
                    FailuresOf([] { CHECK_THROWS(DoNotThrow(), std::runtime_error, ""); }) +
                    FailuresOf([] { CHECK_THROWS(Throw(), std::runtime_error, "key 8"); });
  if (wrong != 4) check::Fail(__FILE__, __LINE__, "a check did not see its failure");
}

TEST(ChecksPassWhatIsRight) {
  CHECK(1 + 1 == 2);
  CHECK_EQ(1 + 1, 2);
  CHECK_THROWS(Throw(), std::runtime_error, "key 7");
}
