// Text as JSON writes it.
#pragma once

#include <cstdio>
#include <string>

namespace sok {

// Quoted. Quotes, backslashes and control characters are all that JSON minds in UTF-8.
inline std::string JsonText(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += escaped;
  }
  return out + "\"";
}

}  // namespace sok
