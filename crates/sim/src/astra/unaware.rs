//! The congestion-unaware network: every message takes the time it would take alone.

use super::engine::{Event, Message, Network, Shipment};
use super::event_queue::EventQueue;

/// Network without contention.
#[derive(Debug)]
pub(super) struct Unaware;

impl Network for Unaware {
    /// Arrival of a message.
    type Event = Message;

    fn send(&mut self, shipment: &Shipment<'_>, agenda: &mut EventQueue<Event<Message>>) {
        let delay = shipment.phase.wires.delay_ns(shipment.offset, shipment.size);
        agenda.add(delay, Event::Network(shipment.message));
    }

    fn happen(&mut self, arrived: Message, _: &mut EventQueue<Event<Message>>) -> Option<Message> {
        Some(arrived)
    }
}
