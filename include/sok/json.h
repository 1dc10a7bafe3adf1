// Text as JSON writes it.
#pragma once

#include <string>

namespace sok {

// Quoted. Our texts are names: quotes, backslashes and control characters are all that JSON minds in them.
inline std::string JsonText(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace sok
