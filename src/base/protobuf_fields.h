#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace fox {

/// A field of a protobuf message as it stands in the bytes (https://protobuf.dev/programming-guides/encoding): what it
/// means, the message's description says.
struct ProtobufField {
  int number = 0;
  uint64_t value = 0;      ///< of a number; of a float or double its bits
  std::string_view bytes;  ///< of a string or a message
};

/// Calls `take` for each field in order; a field that is repeated comes more than once. Returns false when the bytes
/// are no message.
bool read_protobuf(std::string_view message, const std::function<void(const ProtobufField& field)>& take);

}  // namespace fox
