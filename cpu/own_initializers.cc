// The initializers of one's own that this process has registered.
#include <map>
#include <mutex>
#include <string>

#include "sok/error.h"
#include "sok/initializer.h"

namespace sok {
namespace {

struct Registered {
  std::mutex mutex;
  std::map<std::string, SokInitializerFunction> functions;
  static Registered& Instance() {
    static Registered* registered = new Registered;  // never destroyed: threads may outlive main
    return *registered;
  }
};

}  // namespace

SokInitializerFunction OwnInitializer(const std::string& kind) {
  Registered& registered = Registered::Instance();
  const std::lock_guard<std::mutex> lock(registered.mutex);
  const auto found = registered.functions.find(kind.substr(kOwnKind.size()));
  if (found != registered.functions.end()) return found->second;
  throw InvalidArgument("initializer '" + kind +
                        "' has no function in this process. Register it first: import the module that declares it "
                        "(sok.initializer).");
}

}  // namespace sok

static thread_local std::string answer;

extern "C" const char* SokRegisterInitializer(const char* name, SokInitializerFunction function) {
  if (name == nullptr || *name == '\0' || function == nullptr) {
    answer = "an initializer must have a name and a function.";
    return answer.c_str();
  }
  sok::Registered& registered = sok::Registered::Instance();
  const std::lock_guard<std::mutex> lock(registered.mutex);
  registered.functions[name] = function;
  return nullptr;
}
