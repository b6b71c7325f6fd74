// Whether this process may use AMX. Knows no kernels.
#pragma once

#include <string>

namespace mantou {

// "works", "absent" (the processor has none, or this build), or why it does not work. Asks on the first call: a child
// process tries the instructions, since on some virtual machines they trap although the processor announces them.
const std::string& amx_state();

inline bool amx_works() { return amx_state() == "works"; }

}  // namespace mantou
