/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* How a stamp begins, and the counting at the end of a packet's path. */

/* Initialises a stamp. */
static __always_inline void begin(struct stamp *s, __u32 direction, __u32 device, const struct flow *f)
{
	__builtin_memset(s, 0, sizeof(*s));
	s->direction = direction;
	s->slot = device & SLOT;
	s->protocol = class_of(f);
	s->check = check_of(f);
	if (fl_tenants[s->slot] & TRACED) {
		s->traced = 1;
		s->flow = *f;
	}
}

/* A packet has left by the uplink. */
static __always_inline void sent(struct stamp *s, const struct sk_buff *skb, __u64 now)
{
	struct record r = {};
	struct tally *t = tally_of(s->slot, EGRESS, s->protocol & 3);
	__u64 last;
	__u32 check;

	if (!t)
		return; /* its tenant has gone */
	sent_flow(skb, &r.flow);
	check = check_of(&r.flow);
	if (s->check && check && s->check != check) {
		increment(&t->mismatched);
		return;
	}
	increment(&t->matched);
	for (int i = 0; i < STAGES; i++)
		r.stage[i] = NONE;
	last = s->at[E_QUEUED];
	if (!s->host_mode) {
		if (s->at[E_SENT]) {
			r.stage[FIRST] = between(last, s->at[E_SENT]);
			r.stage[ADDED] = between(s->at[E_SENT], now);
			last = s->at[E_SENT];
		}
		if (s->at[E_ARRIVED]) {
			r.stage[DELIVER] = between(last, s->at[E_ARRIVED]);
			last = s->at[E_ARRIVED];
		}
		if (s->at[E_QDISC]) {
			r.stage[FORWARD] = between(last, s->at[E_QDISC]);
			last = s->at[E_QDISC];
		}
	}
	r.stage[QDISC] = between(last, now);
	r.stage[STACK] = between(s->at[E_QUEUED], now);
	count(t, FIRST, r.stage[FIRST]);
	count(t, DELIVER, r.stage[DELIVER]);
	count(t, FORWARD, r.stage[FORWARD]);
	count(t, QDISC, r.stage[QDISC]);
	count(t, ADDED, r.stage[ADDED]);
	count(t, STACK, r.stage[STACK]);
	if (!s->traced || !may_emit(t, now))
		return;
	emit_wait(EGRESS, s->wait, s->at[E_QUEUED]);
	r.flow = s->flow; /* as the container sent it, before NAT */
	r.at = now;
	r.id = s->at[E_QUEUED];
	r.slot = s->slot;
	r.direction = EGRESS;
	fl_emit(&r);
}

/* A packet has arrived at a container's device. */
static __always_inline void arrived(struct cpu *c, struct stamp *s, __u32 stamp, const struct sk_buff *skb, __u32 device, __u64 now)
{
	struct record r = {};
	struct tally *t;
	__u64 last, began;
	__u32 check;

	c->since = 0;
	if (!received_flow(skb, &r.flow))
		return; /* ARP, for example */
	t = tally_of(device, INGRESS, class_of(&r.flow));
	if (!t)
		return;
	increment(&t->seen);
	if (!s) {
		increment(fl_passed_at && (__s64)(now - fl_passed_at) < 1LL << 30 ? &t->unsampled : &t->unmatched);
		return;
	}
	check = check_of(&r.flow);
	if (s->check && check && s->check != check) {
		increment(&t->mismatched);
		fl_abandon(stamp, LOST);
		return;
	}
	if (s->direction != INGRESS) {
		increment(&t->local);
		if (s->direction == FROM_HOST)
			return;
		last = between(s->at[s->at[E_SENT] ? E_SENT : E_QUEUED], now);
		count(t, LOCAL, last);
		t = tally_of(s->slot, EGRESS, s->protocol & 3);
		if (t) {
			increment(&t->local);
			count(t, LOCAL, last);
		}
		return;
	}
	increment(&t->matched);
	for (int i = 0; i < STAGES; i++)
		r.stage[i] = NONE;
	began = last = s->at[I_POLLED] ? s->at[I_POLLED] : s->at[I_RECEIVED];
	if (s->at[I_RECEIVED]) {
		if (s->at[I_POLLED])
			r.stage[FIRST] = between(last, s->at[I_RECEIVED]);
		last = s->at[I_RECEIVED];
	}
	if (s->at[I_QDISC]) {
		r.stage[FORWARD] = between(last, s->at[I_QDISC]);
		last = s->at[I_QDISC];
	}
	if (s->at[I_SENT]) {
		r.stage[QDISC] = between(last, s->at[I_SENT]);
		last = s->at[I_SENT];
		r.stage[DELIVER] = between(last, now);
	} else {
		r.stage[FORWARD] = between(last, now); /* macvlan: there is no host end */
	}
	r.stage[ADDED] = between(began, now);
	count(t, FIRST, r.stage[FIRST]);
	count(t, FORWARD, r.stage[FORWARD]);
	count(t, QDISC, r.stage[QDISC]);
	count(t, DELIVER, r.stage[DELIVER]);
	count(t, ADDED, r.stage[ADDED]);

	c->began = began;
	c->id = began ^ address(c, skb);
	c->slot = device & SLOT;
	c->ifindex = skb->dev->ifindex;
	c->len = r.flow.len && r.flow.len < skb->len ? r.flow.len : skb->len;
	c->protocol = class_of(&r.flow);
	c->traced = fl_tenants[device & SLOT] & TRACED && may_emit(t, now);
	c->since = now;
	if (!c->traced)
		return;
	emit_wait(INGRESS, s->wait, c->id);
	emit_wait(INGRESS, keep_wait(INGRESS, DELIVER, s->at[I_SENT], now), c->id);
	r.at = now;
	r.id = c->id;
	r.slot = c->slot;
	r.direction = INGRESS;
	r.awaits = 1;
	fl_emit(&r);
}

/* A packet has arrived at an uplink; it may be for a tenant without a device. */
static __always_inline void may_be_host(struct cpu *c, const struct sk_buff *skb, const struct stamp *s, const struct flow *f, __u64 now)
{
	c->slot = 0;
	c->traced = 0; /* fl_socket decides */
	c->ifindex = skb->dev->ifindex;
	c->len = f->len && f->len < skb->len ? f->len : skb->len;
	c->protocol = class_of(f);
	c->began = s->at[I_POLLED] ? s->at[I_POLLED] : now;
	c->polled = s->at[I_POLLED];
	c->wait = s->wait;
	c->id = c->began ^ address(c, skb);
	c->flow = *f;
	c->since = now;
}
