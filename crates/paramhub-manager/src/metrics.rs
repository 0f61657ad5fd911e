//! /metrics: the manager's numbers for Prometheus.
//!
//! Jobs and hubs come and go, so their numbers are collected into a fresh registry at each scrape instead of being kept
//! in one: a job that is forgotten leaves no label behind. Only the requests are counted as they happen.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use paramhub_core::membership::Membership;
use paramhub_core::service::{JobCounters, JobState};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::access::Access;
use crate::answered_requests::RequestLabels;
use crate::clock::now;
use crate::connection_slots::ConnectionCounts;
use crate::registry::Registry;

/// The form of what is rendered.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JobLabels {
    job: String,
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RankLabels {
    job: String,
    namespace: String,
    rank: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AwaitedLabels {
    job: String,
    namespace: String,
    rank: u32,
    key: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CoreLabels {
    hub: u32,
    core: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LinkLabels {
    from: String,
    to: String,
}

/// Counts requests when they are answered.
pub(crate) async fn count(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    // A client cannot add labels: there are only as many as there are routes and methods.
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_string();
    let method = match request.method().as_str() {
        "GET" => "GET",
        "POST" => "POST",
        "DELETE" => "DELETE",
        _ => "other",
    };
    let response = next.run(request).await;
    let labels = RequestLabels { method, route, status: response.status().as_u16() };
    access.requests.get_or_create(&labels).inc();
    response
}

/// The selection of numbers that a caller gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// The totals of jobs and hubs, without names.
    Totals,
    /// Also the numbers of each job and each pair of racks, by their names.
    Everything,
}

/// The present numbers, as OpenMetrics text.
pub(crate) fn render(registry: &Registry, detail: Detail) -> String {
    let mut metrics = of_any_manager(&registry.access, registry.term.leads());
    registry.with(|state| {
        let state = &state.membership;
        collect_totals(state, &mut metrics);
        collect_hubs(state, &mut metrics);
        if detail == Detail::Everything {
            collect_jobs(state, &mut metrics);
            collect_links(state, &mut metrics);
        }
    });
    encoded(&metrics)
}

/// The numbers of a manager that does not lead.
pub(crate) fn render_follower(access: &Access) -> String {
    encoded(&of_any_manager(access, false))
}

fn of_any_manager(access: &Access, leads: bool) -> prometheus_client::registry::Registry {
    let mut metrics = prometheus_client::registry::Registry::with_prefix("paramhub");
    metrics.register("manager_requests", "Requests answered", access.requests.clone());
    let leading = Gauge::<i64>::default();
    leading.set(i64::from(leads));
    metrics.register("manager_leads", "1 if this manager serves jobs, 0 if it follows another", leading);
    collect_connections(access.slots.counts(), &mut metrics);
    metrics
}

fn encoded(metrics: &prometheus_client::registry::Registry) -> String {
    let mut text = String::new();
    encode(&mut text, metrics).expect("a String takes all");
    text
}

fn collect_connections(counts: ConnectionCounts, metrics: &mut prometheus_client::registry::Registry) {
    let connections = Family::<KindLabels, Gauge>::default();
    let kinds = [
        ("stranger", counts.unauthenticated),
        ("hub", counts.hubs),
        ("rank", counts.ranks),
        ("operator", counts.operators),
        ("team", counts.teams),
    ];
    for (kind, count) in kinds {
        connections.get_or_create(&KindLabels { kind }).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    metrics.register("manager_connections", "Connections, by what their callers have proved", connections);
    let evictions = Counter::<u64>::default();
    evictions.inc_by(counts.evictions);
    let help = "Callers who had proved nothing and were turned away to make room for newer ones";
    metrics.register("manager_strangers_turned_away", help, evictions);
}

fn collect_totals(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    let states = Family::<StateLabels, Gauge>::default();
    let names = [
        (JobState::Connecting, "connecting"),
        (JobState::Initialising, "initialising"),
        (JobState::Running, "running"),
        (JobState::Finished, "finished"),
        (JobState::Failed, "failed"),
    ];
    for (wanted, label) in names {
        let jobs = state.jobs().filter(|job| job.state() == wanted).count();
        states.get_or_create(&StateLabels { state: label }).set(jobs as i64);
    }
    metrics.register("jobs", "Jobs remembered, by state", states);

    let waiting = Gauge::<i64>::default();
    waiting.set(state.jobs().map(|job| job.waiting() as i64).sum());
    metrics.register("rendezvous_waiting", "ConnectService and InitService calls that wait", waiting);

    let memory = Gauge::<i64>::default();
    let living = state.jobs().filter(|job| !job.state().has_ended());
    let bytes: u64 = living.map(|job| job.counters().memory_bytes).fold(0, u64::saturating_add);
    memory.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    metrics.register("jobs_memory_bytes", "Bytes of the hubs' buffers of all living jobs", memory);
}

/// The numbers of each living job.
fn collect_jobs(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    type Count = fn(&JobCounters) -> u64;
    let counts: [(&str, &str, Count); 5] = [
        ("job_received_bytes", "Bytes the hubs received for a living job", |counters| {
            counters.bytes_received
        }),
        ("job_sent_bytes", "Bytes the hubs sent for a living job", |counters| counters.bytes_sent),
        ("job_contributions", "Contributions summed for a living job", |counters| counters.contributions),
        ("job_updates", "Chunks optimised for a living job", |counters| counters.updates),
        ("job_streams_moved", "Streams of a living job that were cut and opened again", |counters| {
            counters.streams_moved
        }),
    ];
    let busy = Family::<JobLabels, Counter<f64, AtomicU64>>::default();
    let left_out = Family::<RankLabels, Counter>::default();
    let awaited = Family::<AwaitedLabels, Gauge<f64, AtomicU64>>::default();
    let families = counts.map(|_| Family::<JobLabels, Counter>::default());
    let memory = Family::<JobLabels, Gauge>::default();
    for job in state.jobs().filter(|job| !job.state().has_ended()) {
        let labels = JobLabels { job: job.name.clone(), namespace: job.namespace.to_string() };
        let counters = job.counters();
        for (family, (_, _, count)) in families.iter().zip(&counts) {
            family.get_or_create(&labels).inc_by(count(&counters));
        }
        busy.get_or_create(&labels).inc_by(counters.busy_ns as f64 / 1e9);
        for (rank, updates) in (0..).zip(job.left_out()) {
            let labels = RankLabels { job: labels.job.clone(), namespace: labels.namespace.clone(), rank };
            left_out.get_or_create(&labels).inc_by(updates);
        }
        if let Some(late) = job.awaited(now()) {
            for &rank in &late.ranks {
                let JobLabels { job, namespace } = labels.clone();
                let labels = AwaitedLabels { job, namespace, rank, key: late.key.clone() };
                awaited.get_or_create(&labels).set(late.seconds);
            }
        }
        memory.get_or_create(&labels).set(i64::try_from(counters.memory_bytes).unwrap_or(i64::MAX));
    }
    for (family, (name, help, _)) in families.into_iter().zip(counts) {
        metrics.register(name, help, family);
    }
    let help = "Updates of chunks that a living job's hubs made without a rank because it was late";
    metrics.register("job_left_out", help, left_out);
    let help =
        "How long ranks have waited for one that is late beyond what recent steps explain, and at which key";
    metrics.register("job_awaited_seconds", help, awaited);
    collect_losses(state, metrics);
    collect_standbys(state, metrics);
    collect_checkpoints(state, metrics);
    metrics.register("job_core_seconds", "Time that hub cores spent on a living job", busy);
    metrics.register("job_memory_bytes", "Bytes of the hubs' buffers of a living job", memory);
}

/// What living jobs have lost that go on when a worker is lost.
fn collect_losses(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    let [lost, joined] = [(); 2].map(|()| Family::<JobLabels, Counter>::default());
    let incomplete = Family::<JobLabels, Counter<f64, AtomicU64>>::default();
    for job in state.jobs().filter(|job| !job.state().has_ended()) {
        let Some(losses) = job.losses(now()) else { continue };
        let labels = JobLabels { job: job.name.clone(), namespace: job.namespace.to_string() };
        lost.get_or_create(&labels).inc_by(losses.workers_lost);
        joined.get_or_create(&labels).inc_by(losses.workers_joined);
        incomplete.get_or_create(&labels).inc_by(losses.incomplete_seconds);
    }
    metrics.register("job_workers_lost", "Workers that a living job has lost and gone on without", lost);
    metrics.register("job_workers_joined", "Processes that have taken a lost rank of a living job", joined);
    metrics.register("job_incomplete_seconds", "Time during which a living job had lost a rank", incomplete);
}

/// The shares of living jobs whose hub cannot be replaced, if the job is to have standbys.
fn collect_standbys(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    let missing = Family::<JobLabels, Gauge>::default();
    for job in state.jobs() {
        let Some(standbys) = job.standby_counts() else { continue };
        let labels = JobLabels { job: job.name.clone(), namespace: job.namespace.to_string() };
        missing.get_or_create(&labels).set(i64::from(standbys.shares - standbys.ready));
    }
    let help = "Shares of a living job whose standby is missing or has not all chunks yet: the job ends with their hubs";
    metrics.register("job_standbys_missing", help, missing);
}

/// The checkpoints of living jobs that take any.
fn collect_checkpoints(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    let [step, at, bytes] = [(); 3].map(|()| Family::<JobLabels, Gauge>::default());
    let seconds = Family::<JobLabels, Gauge<f64, AtomicU64>>::default();
    let [written, skipped, failed] = [(); 3].map(|()| Family::<JobLabels, Counter>::default());
    for job in state.jobs().filter(|job| !job.state().has_ended()) {
        let Some(status) = job.checkpoints() else { continue };
        let labels = JobLabels { job: job.name.clone(), namespace: job.namespace.to_string() };
        written.get_or_create(&labels).inc_by(status.written);
        skipped.get_or_create(&labels).inc_by(status.skipped);
        failed.get_or_create(&labels).inc_by(status.failed);
        if let Some(newest) = status.step {
            step.get_or_create(&labels).set(newest.into());
            at.get_or_create(&labels).set(i64::try_from(status.written_at).unwrap_or(i64::MAX));
            bytes.get_or_create(&labels).set(i64::try_from(status.bytes).unwrap_or(i64::MAX));
            seconds.get_or_create(&labels).set(status.seconds);
        }
    }
    metrics.register("job_checkpoint_step", "The step of a living job's newest checkpoint", step);
    metrics.register("job_checkpoint_timestamp_seconds", "When it was written, since the Unix epoch", at);
    metrics.register("job_checkpoint_bytes", "Its bytes", bytes);
    metrics.register("job_checkpoint_duration_seconds", "How long it took to copy and write", seconds);
    metrics.register("job_checkpoints_written", "Checkpoints of a living job", written);
    metrics.register("job_checkpoints_skipped", "Those due while another was written", skipped);
    metrics.register("job_checkpoints_failed", "Those that could not be written", failed);
}

fn collect_hubs(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    let [hubs, unheard, drained] = [(); 3].map(|()| Gauge::<i64>::default());
    let busy = Family::<CoreLabels, Counter<f64, AtomicU64>>::default();
    let idle = Family::<CoreLabels, Counter<f64, AtomicU64>>::default();
    let statuses = state.hub_statuses(now());
    let silent = statuses.iter().filter(|hub| hub.unheard).count();
    hubs.set((statuses.len() - silent) as i64);
    unheard.set(silent as i64);
    drained.set(statuses.iter().filter(|hub| hub.drained).count() as i64);
    for hub in statuses {
        for (core, counters) in (0..).zip(hub.cores) {
            let labels = CoreLabels { hub: hub.hub, core };
            busy.get_or_create(&labels).inc_by(counters.busy_ns as f64 / 1e9);
            idle.get_or_create(&labels).inc_by(counters.idle_ns as f64 / 1e9);
        }
    }
    metrics.register("hubs", "Hubs that have joined and are heard", hubs);
    let help = "Hubs that have been silent for too long: they get no new jobs, and their running jobs go on";
    metrics.register("hubs_unheard", help, unheard);
    metrics.register("hubs_drained", "Hubs that an operator drains: they get no new jobs", drained);
    metrics.register("hub_core_busy_seconds", "Time a hub core spent on frames", busy);
    metrics.register("hub_core_idle_seconds", "Time a hub core spent waiting for frames", idle);
}

fn collect_links(state: &Membership, metrics: &mut prometheus_client::registry::Registry) {
    let rates = Family::<LinkLabels, Gauge<f64, AtomicU64>>::default();
    let ages = Family::<LinkLabels, Gauge<f64, AtomicU64>>::default();
    for link in state.link_statuses(now()) {
        let labels = LinkLabels { from: link.from, to: link.to };
        ages.get_or_create(&labels).set(link.age_s);
        if let Some(rate) = link.rate {
            rates.get_or_create(&labels).set(rate.bits_per_second());
        }
    }
    metrics.register("rack_link_bits_per_second", "What a probe between two racks carried", rates);
    metrics.register("rack_link_probe_age_seconds", "Time since that probe", ages);
}
