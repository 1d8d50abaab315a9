//! Report channel from the ranks of one process to the thread that collects their reports.
//!
//! The standard library's channels allocate while they carry messages, and a running run must not
//! allocate. So this is a queue with preallocated capacity. It grows if the receiver falls far
//! behind.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Creates a queue with one receiver; it ends when the last sender is dropped.
pub(crate) fn report_channel<T>(room: usize) -> (ReportSender<T>, ReportReceiver<T>) {
    let said = Queued { queue: VecDeque::with_capacity(room), speakers: 1 };
    let shared = Arc::new(Shared { queued: Mutex::new(said), news: Condvar::new() });
    (ReportSender(Arc::clone(&shared)), ReportReceiver(shared))
}

/// Sending end.
#[derive(Debug)]
pub(crate) struct ReportSender<T>(Arc<Shared<T>>);

/// Receiving end.
#[derive(Debug)]
pub(crate) struct ReportReceiver<T>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T> {
    queued: Mutex<Queued<T>>,
    news: Condvar,
}

#[derive(Debug)]
struct Queued<T> {
    queue: VecDeque<T>,
    speakers: usize,
}

impl<T> Shared<T> {
    /// Locks despite poisoning: a panic under the lock cannot leave the queue inconsistent.
    fn lock(&self) -> MutexGuard<'_, Queued<T>> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> ReportSender<T> {
    pub(crate) fn send(&self, what: T) {
        self.0.lock().queue.push_back(what);
        self.0.news.notify_one();
    }
}

impl<T> Clone for ReportSender<T> {
    fn clone(&self) -> Self {
        self.0.lock().speakers += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for ReportSender<T> {
    fn drop(&mut self) {
        self.0.lock().speakers -= 1;
        self.0.news.notify_one();
    }
}

impl<T> Iterator for ReportReceiver<T> {
    type Item = T;

    /// Waits for the next report, in sending order; `None` when no sender is left.
    fn next(&mut self) -> Option<T> {
        let silent = |said: &mut Queued<T>| said.queue.is_empty() && said.speakers > 0;
        let said = self.0.news.wait_while(self.0.lock(), silent);
        said.unwrap_or_else(PoisonError::into_inner).queue.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_heard_in_order_until_all_have_left() {
        let (speaker, listener) = report_channel(1);
        let heard: Vec<(u32, u32)> = std::thread::scope(|scope| {
            for who in 0..3 {
                let speaker = speaker.clone();
                scope.spawn(move || (0..50).for_each(|word| speaker.send((who, word))));
            }
            drop(speaker);
            listener.collect()
        });
        for who in 0..3 {
            let words = heard.iter().filter(|(from, _)| *from == who).map(|(_, word)| *word);
            assert!(words.eq(0..50));
        }
    }
}
