class Newest:
    def order(self, view):
        for seq in reversed(view.seqs):
            yield view.request(seq)

    def for_admission(self, request, view):
        return ()
