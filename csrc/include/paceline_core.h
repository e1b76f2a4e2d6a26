#ifndef PACELINE_CORE_H
#define PACELINE_CORE_H
#define PLC_API __attribute__((visibility("default")))
PLC_API int plc_abi_version(void);
#endif
