#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fox::data {

/// A token that is found in text as it stands, before the text is encoded.
struct AddedToken {
  int32_t id;
  std::string content;
  bool special;  ///< text unless asked for; a token that is not special is always recognised
};

/// Cuts text at those of `tokens` that are to be found: the leftmost first, of those that begin together the longest.
/// What lies between them is text, empty or not.
void split_at_tokens(std::string_view text, const std::vector<AddedToken>& tokens, bool allow_special,
                     const std::function<void(std::string_view)>& on_text,
                     const std::function<void(int32_t id)>& on_token);

}  // namespace fox::data
