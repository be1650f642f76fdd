// Package tenant groups containers into network tenants. It says who is in a tenant, which
// member owns its journal entries, at which devices its packets pass, what has changed, and
// what the members' policies agree on. It is pure: it reads no file, allocates no slot
// (tenant/identity does) and attaches nothing (hook does).
//
// A feature has a Register of its own and passes it the containers that it works for, in
// Apply and Remove. Both return tenants. The feature brings each up to date, then calls
// Settle. If that fails, the next call for the same container returns the same tenants, with
// the same Change. A tenant outlives its last member until Settle.
//
// netcpu, traffic, latency and overlay use it. Two places still keep tenants of their own:
//
//   - netcpu/charge: payers by cgroup. A key of {Container: number of the TenantGroup's
//     cgroup}, which survives a rename; the largest reserve of Said. But a container stays
//     charged until what was turned for it is restored, so that its Remove can fail.
//   - agent's worker: who shares a network: Members, in a Register of all containers.
package tenant
