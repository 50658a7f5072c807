#include "data/added_tokens.h"

#include <algorithm>

namespace fox::data {

void split_at_tokens(std::string_view text, const std::vector<AddedToken>& tokens, bool allow_special,
                     const std::function<void(std::string_view)>& on_text,
                     const std::function<void(int32_t)>& on_token) {
  struct Found {
    const AddedToken* token;
    size_t at;
  };
  std::vector<Found> candidates;
  for (const AddedToken& token : tokens) {
    if (!token.special || allow_special) candidates.push_back({&token, text.find(token.content)});
  }
  size_t done = 0;
  for (;;) {
    const auto first = std::min_element(candidates.begin(), candidates.end(), [](const Found& a, const Found& b) {
      return a.at != b.at ? a.at < b.at : a.token->content.size() > b.token->content.size();
    });
    if (first == candidates.end() || first->at == std::string_view::npos) break;
    on_text(text.substr(done, first->at - done));
    on_token(first->token->id);
    done = first->at + first->token->content.size();
    for (Found& candidate : candidates) {
      if (candidate.at < done) candidate.at = text.find(candidate.token->content, done);
    }
  }
  on_text(text.substr(done));
}

}  // namespace fox::data
