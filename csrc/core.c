#include "paceline_core.h"
int plc_abi_version(void) { return 1; }
