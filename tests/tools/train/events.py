"""What event files show."""

from mtf_gradsync._private.libraries import tf


def events_shown(directory):
    """Steps and values by tag, of what a session made again the newest."""
    shown = {}
    for path in sorted(directory.glob("events.out.tfevents.*")):
        for event in tf.train.summary_iterator(str(path)):
            if event.session_log.status == tf.SessionLog.START:
                for tag, values in shown.items():
                    shown[tag] = [(step, x) for step, x in values if step < event.step]
            for value in event.summary.value:
                shown.setdefault(value.tag, []).append((event.step, value.simple_value))
    return shown
