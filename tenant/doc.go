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
// feature/overlay and feature/latency use it. The others still keep tenants of their own. This is
// what each needs, and where it finds it:
//
//   - traffic: one policy for all that ask for bandwidth. AgreeFunc; while they Disagree, it
//     keeps the last value. Remove, for a newcomer that it refuses. Owner, not the lowest id.
//   - netcpu/isolate: who pays, and who is next: Owner. The last expiry: Expiry of Members.
//   - netcpu/drop: a namespace that its payer has left, until counting there ends: At, Settle.
//   - netcpu/charge: payers by cgroup. A key of {Container: number of the TenantGroup's
//     cgroup}, which survives a rename; the largest reserve of Said.
//   - netcpu: the strictest mode, the first of equals: slices.MaxFunc on Said.
//   - agent's worker: who shares a network: Members, in a Register of all containers.
package tenant
